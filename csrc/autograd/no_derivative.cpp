// The private ops have no derivative: they are called below autograd, by the nodes of the public
// ones. Above autograd, an op that returns tensors can be called, and their backward raises an
// error (PyTorch's fallback). An op that writes over its argument raises one at once, since the
// argument keeps the graph of the values that it had.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

namespace memopt::autograd {
namespace {

void check_has_no_graph(const c10::OperatorHandle& op, const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.defined() || !tensor.requires_grad(), op.operator_name().name,
              " writes over its argument and has no derivative; it must be called below autograd, "
              "or with arguments that require no gradient");
}

void in_place(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  if (at::GradMode::is_enabled()) {
    for (const at::IValue& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
      if (argument.isTensor()) check_has_no_graph(op, argument.toTensor());
    }
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.callBoxed(stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, Autograd, m) {
  for (const char* name :
       {"_activation_forward", "_activation_backward", "_activation_dropout_forward",
        "_activation_dropout_backward", "_dropout_forward", "_gated_forward", "_gated_backward",
        "_gated_packed_forward", "_gated_packed_backward", "_norm_forward", "_norm_backward",
        "_dropout_add_norm_forward", "_dropout_add_norm_backward"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
  for (const char* name : {"_activation_forward_", "_activation_backward_", "_gated_forward_",
                           "_gated_backward_", "_norm_backward_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_place>());
  }
}

}  // namespace memopt::autograd
