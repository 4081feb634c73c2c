#include "no_derivative.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <string>

#include "../ops/declare.h"

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

void register_no_derivatives() {
  auto& library =
      *new torch::Library(torch::Library::IMPL, "memopt", c10::DispatchKey::Autograd, __FILE__,
                          __LINE__);  // for ever
  for (const std::string& name : ops::private_ops()) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
    if (op.hasKernelForDispatchKey(c10::DispatchKey::Autograd)) continue;  // dropout's backward
    library.impl(name.c_str(), op.schema().is_mutable()
                                   ? torch::CppFunction::makeFromBoxedFunction<&in_place>()
                                   : torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace memopt::autograd
