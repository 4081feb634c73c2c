// activation_dropout: saves its input and the state of its random numbers; computes the activation
// and draws the mask again.
//
//   output = f(input) m        grad_input = grad_output m f'(input)
//
// Saved: input, 2 bytes an element in bfloat16, and 16 bytes a call. Neither f(input) nor a mask.
#include "activation_dropout.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <string>

#include "activation.h"
#include "dropout.h"
#include "random.h"
#include "recipe.h"

namespace memopt::autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Public = Tensor(const Tensor&, double, std::string_view);
using Forward = std::tuple<Tensor, Tensor>(const Tensor&, const OptionalTensor&, double,
                                           std::string_view);
using Backward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, double,
                                            std::string_view, bool);

const c10::TypedOperatorHandle<Forward>& forward_op() {
  static const auto op = find_op<Forward>("memopt::_activation_dropout_forward");
  return op;
}

}  // namespace

std::tuple<Tensor, Tensor> activation_dropout_forward(const Tensor& input, double p,
                                                      std::string_view activation) {
  const OptionalTensor given = state_to_apply(input);
  const auto [output, drawn] = forward_op().call(input, given, p, activation);
  return {output, given.has_value() ? *given : drawn};
}

Tensor activation_dropout_again(const Tensor& input, const Tensor& state, double p,
                                std::string_view activation) {
  return std::get<0>(forward_op().call(input, state, p, activation));
}

std::tuple<Tensor, Tensor> activation_dropout_backward(const Tensor& grad, const Tensor& input,
                                                       const Tensor& state, double p,
                                                       std::string_view activation,
                                                       bool output_again) {
  static const auto op = find_op<Backward>("memopt::_activation_dropout_backward");
  return op.call(grad, input, state, p, activation, output_again);
}

namespace {

struct ActivationDropout : torch::autograd::Function<ActivationDropout> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, double p,
                        std::string_view activation) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [output, state] = activation_dropout_forward(input, p, activation);
    ctx->save_for_backward({input, state});
    ctx->saved_data["p"] = p;
    ctx->saved_data["activation"] = std::string(activation);
    remember(output, [&] {
      return Recipe{{input, state},
                    [p, name = std::string(activation)](const variable_list& saved) {
                      return activation_dropout_again(saved[0], saved[1], p, name);
                    }};
    });
    return output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor& input = saved[0];
    const Tensor& state = saved[1];
    const double p = ctx->saved_data["p"].toDouble();
    const std::string activation = ctx->saved_data["activation"].toStringRef();
    if (at::GradMode::is_enabled()) {
      const Tensor dropped = drop_again(widened(grads[0]), state, p);
      const Tensor dx = activation_gradient(activation, dropped, widened(input));
      return {dx.to(input.scalar_type()), Tensor(), Tensor()};
    }
    const auto [dx, output] =
        activation_dropout_backward(grads[0], input, state, p, activation, /*output_again=*/false);
    return {dx, Tensor(), Tensor()};
  }
};

Tensor activation_dropout(const Tensor& input, double p, std::string_view activation) {
  if (needs_node(input)) return ActivationDropout::apply(input, p, activation);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (is_traced(input)) return std::get<0>(activation_dropout_forward(input, p, activation));
  static const auto op = find_op<Public>("memopt::activation_dropout");
  return op.call(input, p, activation);
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, Autograd, m) {
  m.impl("activation_dropout", activation_dropout);
  m.impl("_activation_dropout_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("_activation_dropout_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace memopt::autograd
