// dropout_add_layer_norm, dropout_add_rms_norm: sum = input m + residual, output = norm(sum). They
// save the sum, the norm's statistics and the state of the random numbers; neither input, residual
// nor m.
//
//   grad_residual = grad_sum + the norm's gradient at sum        grad_input = grad_residual m
//
// Saved: sum, which the caller holds anyway (it is the residual stream), 8 bytes a row (4 for
// RMSNorm) and 16 bytes a call. A gradient that is undefined costs nothing, as in add_norm.cpp.
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <tuple>

#include "dropout.h"
#include "layer_norm.h"
#include "random.h"
#include "rms_norm.h"
#include "saved_output.h"

namespace memopt::autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The norm's gradient by differentiable ops, and the sum's own.
Tensor differentiable_add(const Tensor& norm_grad, const Tensor& grad_sum) {
  return norm_grad.defined() && grad_sum.defined() ? norm_grad + grad_sum : norm_grad;
}

// This node's edges to input, residual, weight and bias, which count only the tensors that are
// there: input and residual always are.
bool wants_input(AutogradContext* ctx) {
  return ctx->needs_input_grad(0);
}
bool wants_residual(AutogradContext* ctx) {
  return ctx->needs_input_grad(1);
}

// Gradients for the arguments of forward().
variable_list for_arguments(AutogradContext* ctx, const Tensor& dx, const Tensor& dresidual) {
  return {wants_input(ctx) ? dx : Tensor(),
          wants_residual(ctx) ? dresidual : Tensor(),
          Tensor(),
          Tensor(),
          Tensor(),
          Tensor(),
          Tensor(),
          Tensor()};
}

using LayerNormPublic = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, double,
                                                   c10::SymIntArrayRef, const OptionalTensor&,
                                                   const OptionalTensor&, double);
using LayerNormForward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(
    const Tensor&, const Tensor&, const OptionalTensor&, double, c10::SymIntArrayRef,
    const OptionalTensor&, const OptionalTensor&, double);
using LayerNormBackward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(
    const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&, double, c10::SymIntArrayRef,
    const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, std::array<bool, 4>,
    bool);

const c10::TypedOperatorHandle<LayerNormForward>& layer_norm_forward_op() {
  static const auto op = find_op<LayerNormForward>("memopt::_dropout_add_layer_norm_forward");
  return op;
}

struct DropoutAddLayerNorm : torch::autograd::Function<DropoutAddLayerNorm> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& input, const Tensor& residual,
                               double p, c10::SymIntArrayRef normalized_shape,
                               const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                               Tensor* saved_output) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->set_materialize_grads(false);
    const OptionalTensor given = state_to_apply(input);
    const auto [output, sum, mean, rstd, drawn] = layer_norm_forward_op().call(
        input, residual, given, p, normalized_shape, weight, bias, eps);
    ctx->save_for_backward({sum, value_or_undefined(weight), value_or_undefined(bias), mean, rstd,
                            given.has_value() ? *given : drawn});
    ctx->saved_data["normalized_shape"] = normalized_shape;
    ctx->saved_data["p"] = p;
    remember_layer_norm(output, sum, normalized_shape, weight, bias, eps);
    *saved_output = sum;
    return {output, sum};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<LayerNormBackward>("memopt::_dropout_add_layer_norm_backward");
    const Tensor& grad_output = grads[0];
    const Tensor& grad_sum = grads[1];
    const variable_list saved = ctx->get_saved_variables();
    const Tensor& state = saved[5];
    const double p = ctx->saved_data["p"].toDouble();
    if (!grad_output.defined()) {
      const Tensor dx = wants_input(ctx) ? drop_again(grad_sum, state, p) : Tensor();
      return for_arguments(ctx, dx, grad_sum);
    }
    LayerNormSaved s{saved[0], saved[1], saved[2],
                     saved[3], saved[4], ctx->saved_data["normalized_shape"].toSymIntVector()};
    size_t edge = 2;
    s.wanted = {wants_input(ctx) || wants_residual(ctx),
                s.weight.defined() && ctx->needs_input_grad(edge++),
                s.bias.defined() && ctx->needs_input_grad(edge)};
    variable_list gradients;
    if (at::GradMode::is_enabled()) {
      const auto [dv, dweight, dbias] = differentiable_backward(s, widen(s), grad_output);
      const Tensor dsum = differentiable_add(dv, grad_sum);
      gradients =
          for_arguments(ctx, wants_input(ctx) ? drop_again(dsum, state, p) : Tensor(), dsum);
      gradients[4] = dweight;
      gradients[5] = dbias;
    } else {
      const std::array<bool, 4> mask{wants_input(ctx), wants_residual(ctx), s.wanted[1],
                                     s.wanted[2]};
      const auto [dx, dresidual, dweight, dbias, output] =
          op.call(grad_output, as_optional(grad_sum), s.input, state, p, s.normalized_shape, s.mean,
                  s.rstd, as_optional(s.weight), as_optional(s.bias), mask,
                  /*recompute_output=*/false);
      gradients = for_arguments(ctx, dx, dresidual);
      gradients[4] = dweight;
      gradients[5] = dbias;
    }
    return gradients;
  }
};

std::tuple<Tensor, Tensor> dropout_add_layer_norm(const Tensor& input, const Tensor& residual,
                                                  double p, c10::SymIntArrayRef normalized_shape,
                                                  const OptionalTensor& weight,
                                                  const OptionalTensor& bias, double eps) {
  if (needs_node(input, residual, weight, bias)) {
    const variable_list outputs = apply_saving_output<DropoutAddLayerNorm>(
        input, residual, p, normalized_shape, weight, bias, eps);
    return {outputs[0], outputs[1]};
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (is_traced(input)) {
    const auto results = layer_norm_forward_op().call(input, residual, traced_state(input), p,
                                                      normalized_shape, weight, bias, eps);
    return {std::get<0>(results), std::get<1>(results)};
  }
  static const auto op = find_op<LayerNormPublic>("memopt::dropout_add_layer_norm");
  return op.call(input, residual, p, normalized_shape, weight, bias, eps);
}

using RmsNormPublic = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, double,
                                                 c10::SymIntArrayRef, const OptionalTensor&,
                                                 std::optional<double>, bool);
using RmsNormForward = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const Tensor&,
                                                                  const OptionalTensor&, double,
                                                                  c10::SymIntArrayRef,
                                                                  const OptionalTensor&,
                                                                  std::optional<double>, bool);
using RmsNormBackward = std::tuple<Tensor, Tensor, Tensor, Tensor>(
    const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&, double, c10::SymIntArrayRef,
    const Tensor&, const OptionalTensor&, std::array<bool, 3>, bool, bool);

const c10::TypedOperatorHandle<RmsNormForward>& rms_norm_forward_op() {
  static const auto op = find_op<RmsNormForward>("memopt::_dropout_add_rms_norm_forward");
  return op;
}

struct DropoutAddRmsNorm : torch::autograd::Function<DropoutAddRmsNorm> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& input, const Tensor& residual,
                               double p, c10::SymIntArrayRef normalized_shape,
                               const OptionalTensor& weight, std::optional<double> eps,
                               bool zero_centered_weight, Tensor* saved_output) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->set_materialize_grads(false);
    const OptionalTensor given = state_to_apply(input);
    const auto [output, sum, rstd, drawn] = rms_norm_forward_op().call(
        input, residual, given, p, normalized_shape, weight, eps, zero_centered_weight);
    ctx->save_for_backward(
        {sum, value_or_undefined(weight), rstd, given.has_value() ? *given : drawn});
    save_options(ctx, normalized_shape, eps, zero_centered_weight);
    ctx->saved_data["p"] = p;
    remember_rms_norm(output, sum, normalized_shape, weight, eps, zero_centered_weight);
    *saved_output = sum;
    return {output, sum};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<RmsNormBackward>("memopt::_dropout_add_rms_norm_backward");
    const Tensor& grad_output = grads[0];
    const Tensor& grad_sum = grads[1];
    const variable_list saved = ctx->get_saved_variables();
    const Tensor& state = saved[3];
    const double p = ctx->saved_data["p"].toDouble();
    if (!grad_output.defined()) {
      const Tensor dx = wants_input(ctx) ? drop_again(grad_sum, state, p) : Tensor();
      return for_arguments(ctx, dx, grad_sum);
    }
    RmsNormSaved s{saved[0], saved[1], saved[2]};
    restore_options(ctx, &s);
    s.wanted = {wants_input(ctx) || wants_residual(ctx),
                s.weight.defined() && ctx->needs_input_grad(2)};
    variable_list gradients;
    if (at::GradMode::is_enabled()) {
      const auto [dv, dweight] = differentiable_backward(s, grad_output);
      const Tensor dsum = differentiable_add(dv, grad_sum);
      gradients =
          for_arguments(ctx, wants_input(ctx) ? drop_again(dsum, state, p) : Tensor(), dsum);
      gradients[4] = dweight;
    } else {
      const std::array<bool, 3> mask{wants_input(ctx), wants_residual(ctx), s.wanted[1]};
      const auto [dx, dresidual, dweight, output] =
          op.call(grad_output, as_optional(grad_sum), s.input, state, p, s.normalized_shape, s.rstd,
                  as_optional(s.weight), mask, /*recompute_output=*/false, s.zero_centered_weight);
      gradients = for_arguments(ctx, dx, dresidual);
      gradients[4] = dweight;
    }
    return gradients;
  }
};

std::tuple<Tensor, Tensor> dropout_add_rms_norm(const Tensor& input, const Tensor& residual,
                                                double p, c10::SymIntArrayRef normalized_shape,
                                                const OptionalTensor& weight,
                                                std::optional<double> eps,
                                                bool zero_centered_weight) {
  if (needs_node(input, residual, weight)) {
    const variable_list outputs = apply_saving_output<DropoutAddRmsNorm>(
        input, residual, p, normalized_shape, weight, eps, zero_centered_weight);
    return {outputs[0], outputs[1]};
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (is_traced(input)) {
    const auto results =
        rms_norm_forward_op().call(input, residual, traced_state(input), p, normalized_shape,
                                   weight, eps, zero_centered_weight);
    return {std::get<0>(results), std::get<1>(results)};
  }
  static const auto op = find_op<RmsNormPublic>("memopt::dropout_add_rms_norm");
  return op.call(input, residual, p, normalized_shape, weight, eps, zero_centered_weight);
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, Autograd, m) {
  m.impl("dropout_add_layer_norm", dropout_add_layer_norm);
  m.impl("_dropout_add_layer_norm_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("_dropout_add_layer_norm_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("dropout_add_rms_norm", dropout_add_rms_norm);
  m.impl("_dropout_add_rms_norm_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("_dropout_add_rms_norm_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace memopt::autograd
