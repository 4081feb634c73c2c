// gelu: saves its input; recomputes everything else.
//
//   grad_input = grad_output gelu'(input)
//
// Saved: input, 2 bytes an element in bfloat16. The consumer of the output (a Linear, say) saves
// that output itself.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/gelu_backward.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <string>
#include <string_view>
#include <tuple>

#include "support.h"

namespace memopt::autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Public = Tensor(const Tensor&, std::string_view);
using Forward = Tensor(const Tensor&, std::string_view);
using Backward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, std::string_view, bool);

struct Gelu : torch::autograd::Function<Gelu> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, std::string_view approximate) {
    static const auto op = find_op<Forward>("memopt::_gelu_forward");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({input});
    ctx->saved_data["approximate"] = std::string(approximate);
    return op.call(input, approximate);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<Backward>("memopt::_gelu_backward");
    const Tensor input = ctx->get_saved_variables()[0];
    const std::string approximate = ctx->saved_data["approximate"].toStringRef();
    // create_graph=True: PyTorch's own formula, which is differentiable.
    if (at::GradMode::is_enabled())
      return {at::gelu_backward(grads[0], input, approximate), Tensor()};
    return {std::get<0>(op.call(grads[0], input, approximate, /*recompute_output=*/false)),
            Tensor()};
  }
};

Tensor gelu(const Tensor& input, std::string_view approximate) {
  if (needs_node(input)) return Gelu::apply(input, approximate);
  static const auto op = find_op<Public>("memopt::gelu");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(input, approximate);
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, Autograd, m) {
  m.impl("gelu", gelu);
  m.impl("_gelu_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("_gelu_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace memopt::autograd
