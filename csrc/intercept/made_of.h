// What PyTorch's ops make of a tensor alone: the registry of recipes is told how, where that tensor
// has a recipe.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "here.h"
#include "key.h"
#include "taken.h"

namespace memopt::intercept {

// Making the tensor again reads what it is made of: of less than a sixteenth of that (a mean over
// all of an image) more time is lost than memory won.
constexpr int64_t kReadForEachMade = 16;

// Arguments as they are kept in a recipe, which outlives the call.
inline std::vector<c10::SymInt> owned(c10::SymIntArrayRef numbers) {
  return numbers.vec();
}
inline std::vector<int64_t> owned(at::IntArrayRef numbers) {
  return numbers.vec();
}
template <class Number>
Number owned(const Number& number) {
  return number;
}

// Tells the registry how `made` is made again: by `recipe()` (autograd::Recipe), from `self` and
// what else that reads.
template <class MakeRecipe>
void note_made_of(const at::Tensor& made, const at::Tensor& self, MakeRecipe recipe) {
  if (!made.requires_grad()) return;
  const Here now = here();
  if (!now.functions || !now.recipes->may_make(self) || !supports(self)) return;
  if (made.numel() * kReadForEachMade < self.numel()) return;
  const PassOn pass_on;
  now.recipes->add_made_of(made, recipe(), /*is_sum=*/false);
}

// The kernel of `Op` (at::_ops) under the key: PyTorch's own, which makes a tensor of its first
// argument and of numbers.
template <class Op>
struct MadeOf {
  template <class Schema>
  struct Kernel;
  template <class... Numbers>
  struct Kernel<at::Tensor(const at::Tensor&, Numbers...)> {
    static at::Tensor call(c10::DispatchKeySet keys, const at::Tensor& self, Numbers... numbers) {
      at::Tensor made = Op::redispatch(below_intercept(keys), self, numbers...);
      note_made_of(made, self, [&]() -> autograd::Recipe {
        return {{self}, [kept = std::make_tuple(owned(numbers)...)](const auto& read) {
                  return std::apply([&](const auto&... own) { return Op::call(read[0], own...); },
                                    kept);
                }};
      });
      return made;
    }
  };
  using Call = Kernel<typename Op::schema>;
};

#define MEMOPT_MADE_OF(op) m.impl(#op, TORCH_FN((MadeOf<at::_ops::op>::Call::call)));

}  // namespace memopt::intercept
