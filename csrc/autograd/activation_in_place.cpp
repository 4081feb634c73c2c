// Activations that write over their input, with PyTorch's semantics to the letter: whoever holds
// the tensor, or a view of it, finds the activated values there afterwards, and what saved it
// before raises in backward.
//
//   self <- f(self)      grad_self' = grad_self f'(what stood there)
//
// Backward needs what is overwritten. PyTorch saves a clone of it (silu_, hardswish_), or the
// result where that is enough (relu_, leaky_relu_); the next layer saves the result in any case.
// Here:
//
//   what is overwritten has a recipe     saved: nothing, it is made again (RecipeRecorder)
//   it has none                          saved: a clone, as PyTorch's; where the result would have
//                                        done PyTorch's op runs
//
// and the result has a recipe, which begins at what is saved: nothing else need keep it. So a norm
// and the activation behind it keep what the norm keeps.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/elu_ops.h>
#include <ATen/ops/leaky_relu_ops.h>
#include <ATen/ops/relu_ops.h>
#include <ATen/ops/sigmoid_ops.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>

#include <string>
#include <string_view>
#include <utility>

#include "../ops/checks.h"
#include "activation.h"
#include "declare.h"
#include "run.h"

namespace memopt::autograd {

namespace {

// Of two tensors: what stood in the memory, and the memory's.
struct ActivationInPlaceOp : ActivationOp {
  static Produced forward(const Options& options, const variable_list& in, bool /*for_backward*/) {
    write_over(options, in[1]);
    return {same_memory(in[1]), {in[0]}, {}, {}};
  }

  static void write_over(const Options& options, const Tensor& input) {
    static const auto op = MEMOPT_PRIVATE_OP(_activation_forward_);
    op.call(input, options.activation, options.scalar);
  }

  // With its version counter, and without its history. Modes must not see this.
  static Tensor same_memory(const Tensor& tensor) {
    const c10::impl::ExcludeDispatchKeyGuard unseen(c10::DispatchKey::Python);
    const auto* impl = tensor.unsafeGetTensorImpl();
    return Tensor(impl->shallow_copy_and_detach(impl->version_counter(),
                                                /*allow_tensor_metadata_change=*/false));
  }
};

// PyTorch's op, where it saves its result and not what it overwrites; whether it is one of those.
bool run_saving_result(const Tensor& self, std::string_view name, std::optional<double> scalar) {
  Tensor target = self;
  if (name == "relu") {
    at::_ops::relu_::call(target);
  } else if (name == "leaky_relu") {
    at::_ops::leaky_relu_::call(target, *scalar);
  } else if (name == "elu") {
    at::_ops::elu_::call(target, *scalar, 1, 1);
  } else if (name == "sigmoid") {
    at::_ops::sigmoid_::call(target);
  } else {
    return false;
  }
  return true;
}

// What stands in `self` now, for a node to save, where `self` stands in the graph.
Tensor copy_with_history(const Tensor& self) {
  Tensor copy;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    copy = self.clone();
  }
  torch::autograd::impl::set_gradient_edge(copy, torch::autograd::impl::gradient_edge(self));
  return copy;
}

void activation_(const Tensor& self, std::string_view name, std::optional<double> scalar) {
  ops::check_activation("activation_", name, scalar);
  ops::check_input("activation_", "input", self);
  const ActivationOptions options{.activation = std::string(name), .scalar = scalar};
  const bool has_node = needs_node("activation_", {self});
  // A compiler makes of this what it likes; a leaf that requires a gradient raises, and the history
  // of a view is for PyTorch to write again.
  const bool is_composed = is_traced(self) || !self.is_non_overlapping_and_dense() ||
                           (has_node && (self.is_leaf() || self.is_view()));
  if (is_composed) {
    self.copy_(run<ActivationOp>("activation_", options, {self.clone()})[0]);
    return;
  }
  Tensor before;
  if (has_node) {
    if (recipe_recorder() != nullptr) before = recipe_recorder()->stand_in_for(self);
    if (!before.defined()) {
      if (run_saving_result(self, name, scalar)) return;
      before = copy_with_history(self);
    }
  }
  auto* impl = self.unsafeGetTensorImpl();
  if (!self.is_inference()) impl->bump_version();
  if (!has_node) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    ActivationInPlaceOp::write_over(options, self);
    return;
  }
  const Tensor after = apply_node<ActivationInPlaceOp>(
      options, {std::move(before), ActivationInPlaceOp::same_memory(self)})[0];
  torch::autograd::impl::rebase_history(self, torch::autograd::impl::gradient_edge(after));
}

MEMOPT_DECLARE(activation_, {}, {},
               R"(activation_(Tensor(a!) input, str activation, float? activation_scalar=None)
                  -> ())");

}  // namespace
}  // namespace memopt::autograd
