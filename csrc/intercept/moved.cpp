// PyTorch's copies inside a converted model: of a tensor in another layout, padded, rolled. They
// are PyTorch's own, and save nothing; where what is copied has a recipe the registry is told how
// the copy is made from it, so that a convolution behind a padding, or a linear behind a window of
// attention, does not keep the copy.
#include <ATen/core/Tensor.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/clone_ops.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/constant_pad_nd_ops.h>
#include <ATen/ops/roll.h>
#include <ATen/ops/roll_ops.h>
#include <torch/library.h>

#include <optional>
#include <utility>
#include <vector>

#include "here.h"
#include "key.h"
#include "taken.h"

namespace memopt::intercept {

namespace {

using at::Tensor;
using c10::DispatchKeySet;
using Format = std::optional<at::MemoryFormat>;
using Numbers = std::vector<c10::SymInt>;

// `make` makes the copy of a tensor like `self`.
template <class Make>
void note_copy(const Tensor& copy, const Tensor& self, Make make) {
  if (!copy.requires_grad()) return;
  const Here now = here();
  if (!now.functions || !now.recipes->may_make(self) || !supports(self)) return;
  const PassOn pass_on;
  now.recipes->add_made_of(
      copy, {{self}, [make = std::move(make)](const auto& read) { return make(read[0]); }},
      /*is_sum=*/false);
}

Tensor clone(DispatchKeySet keys, const Tensor& self, Format format) {
  Tensor copy = at::_ops::clone::redispatch(below_intercept(keys), self, format);
  note_copy(copy, self, [format](const Tensor& like) { return at::clone(like, format); });
  return copy;
}

Tensor pad(DispatchKeySet keys, const Tensor& self, c10::SymIntArrayRef pad,
           const at::Scalar& value) {
  Tensor copy = at::_ops::constant_pad_nd::redispatch(below_intercept(keys), self, pad, value);
  note_copy(copy, self, [pad = Numbers(pad.begin(), pad.end()), value](const Tensor& like) {
    return at::constant_pad_nd_symint(like, pad, value);
  });
  return copy;
}

Tensor roll(DispatchKeySet keys, const Tensor& self, c10::SymIntArrayRef shifts,
            at::IntArrayRef dims) {
  Tensor copy = at::_ops::roll::redispatch(below_intercept(keys), self, shifts, dims);
  note_copy(copy, self,
            [shifts = Numbers(shifts.begin(), shifts.end()), dims = dims.vec()](
                const Tensor& like) { return at::roll_symint(like, shifts, dims); });
  return copy;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, DeferredInit, m) {
  m.impl("clone", clone);
  m.impl("constant_pad_nd", pad);
  m.impl("roll", roll);
}

}  // namespace memopt::intercept
