// add_layer_norm, add_rms_norm: sum = input + residual, output = norm(sum). They save the sum and
// the norm's statistics; neither input nor residual.
//
//   grad_input = grad_residual = grad_sum + the norm's gradient at sum
//
// Saved: sum, which the caller holds anyway (it is the residual stream), and 8 bytes a row (4 for
// add_rms_norm). A gradient that is undefined, because nothing used that output, costs nothing: the
// norm's own backward runs without grad_sum, and no kernel without grad_output.
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <tuple>

#include "layer_norm.h"
#include "rms_norm.h"
#include "saved_output.h"

namespace memopt::autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Of the node's edges to input, residual, weight and bias, which count only the tensors that are
// there.
bool wants_sum(AutogradContext* ctx) {
  return ctx->needs_input_grad(0) || ctx->needs_input_grad(1);
}

// The norm's gradient by differentiable ops, and the sum's own.
Tensor differentiable_add(const Tensor& norm_grad, const Tensor& grad_sum) {
  return norm_grad.defined() && grad_sum.defined() ? norm_grad + grad_sum : norm_grad;
}

using AddLayerNormPublic = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&,
                                                      c10::SymIntArrayRef, const OptionalTensor&,
                                                      const OptionalTensor&, double);
using AddLayerNormForward = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const Tensor&,
                                                                       c10::SymIntArrayRef,
                                                                       const OptionalTensor&,
                                                                       const OptionalTensor&,
                                                                       double);
using AddLayerNormBackward = std::tuple<Tensor, Tensor, Tensor, Tensor>(
    const Tensor&, const OptionalTensor&, const Tensor&, c10::SymIntArrayRef, const Tensor&,
    const Tensor&, const OptionalTensor&, const OptionalTensor&, std::array<bool, 3>, bool);

struct AddLayerNorm : torch::autograd::Function<AddLayerNorm> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& input, const Tensor& residual,
                               c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                               const OptionalTensor& bias, double eps, Tensor* saved_output) {
    static const auto op = find_op<AddLayerNormForward>("memopt::_add_layer_norm_forward");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->set_materialize_grads(false);
    const auto [output, sum, mean, rstd] =
        op.call(input, residual, normalized_shape, weight, bias, eps);
    save(ctx, sum, normalized_shape, weight, bias, mean, rstd);
    remember_layer_norm(output, sum, normalized_shape, weight, bias, eps);
    *saved_output = sum;
    return {output, sum};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<AddLayerNormBackward>("memopt::_add_layer_norm_backward");
    const Tensor& grad_output = grads[0];
    const Tensor& grad_sum = grads[1];
    if (!grad_output.defined())
      return {grad_sum, grad_sum, Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
    LayerNormSaved s = restore(ctx);
    size_t edge = 2;  // this node's edges, not layer_norm's
    s.wanted = {wants_sum(ctx), s.weight.defined() && ctx->needs_input_grad(edge++),
                s.bias.defined() && ctx->needs_input_grad(edge)};
    if (at::GradMode::is_enabled()) {
      const auto [dx, dweight, dbias] = differentiable_backward(s, widen(s), grad_output);
      const Tensor dsum = differentiable_add(dx, grad_sum);
      return {dsum, dsum, Tensor(), dweight, dbias, Tensor(), Tensor()};
    }
    const auto [dsum, dweight, dbias, output] =
        op.call(grad_output, as_optional(grad_sum), s.input, s.normalized_shape, s.mean, s.rstd,
                as_optional(s.weight), as_optional(s.bias), s.wanted, /*recompute_output=*/false);
    return {dsum, dsum, Tensor(), dweight, dbias, Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& input, const Tensor& residual,
                                          c10::SymIntArrayRef normalized_shape,
                                          const OptionalTensor& weight, const OptionalTensor& bias,
                                          double eps) {
  if (needs_node(input, residual, weight, bias)) {
    const variable_list outputs =
        apply_saving_output<AddLayerNorm>(input, residual, normalized_shape, weight, bias, eps);
    return {outputs[0], outputs[1]};
  }
  static const auto op = find_op<AddLayerNormPublic>("memopt::add_layer_norm");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(input, residual, normalized_shape, weight, bias, eps);
}

using AddRmsNormPublic = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&,
                                                    c10::SymIntArrayRef, const OptionalTensor&,
                                                    std::optional<double>, bool);
using AddRmsNormForward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&,
                                                             c10::SymIntArrayRef,
                                                             const OptionalTensor&,
                                                             std::optional<double>, bool);
using AddRmsNormBackward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const OptionalTensor&,
                                                              const Tensor&, c10::SymIntArrayRef,
                                                              const Tensor&, const OptionalTensor&,
                                                              std::array<bool, 2>, bool, bool);

struct AddRmsNorm : torch::autograd::Function<AddRmsNorm> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& input, const Tensor& residual,
                               c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                               std::optional<double> eps, bool zero_centered_weight,
                               Tensor* saved_output) {
    static const auto op = find_op<AddRmsNormForward>("memopt::_add_rms_norm_forward");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->set_materialize_grads(false);
    const auto [output, sum, rstd] =
        op.call(input, residual, normalized_shape, weight, eps, zero_centered_weight);
    ctx->save_for_backward({sum, value_or_undefined(weight), rstd});
    save_options(ctx, normalized_shape, eps, zero_centered_weight);
    remember_rms_norm(output, sum, normalized_shape, weight, eps, zero_centered_weight);
    *saved_output = sum;
    return {output, sum};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<AddRmsNormBackward>("memopt::_add_rms_norm_backward");
    const Tensor& grad_output = grads[0];
    const Tensor& grad_sum = grads[1];
    if (!grad_output.defined())
      return {grad_sum, grad_sum, Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
    const variable_list saved = ctx->get_saved_variables();
    RmsNormSaved s{saved[0], saved[1], saved[2]};
    restore_options(ctx, &s);
    s.wanted = {wants_sum(ctx), s.weight.defined() && ctx->needs_input_grad(2)};
    if (at::GradMode::is_enabled()) {
      const auto [dx, dweight] = differentiable_backward(s, grad_output);
      const Tensor dsum = differentiable_add(dx, grad_sum);
      return {dsum, dsum, Tensor(), dweight, Tensor(), Tensor(), Tensor()};
    }
    const auto [dsum, dweight, output] = op.call(
        grad_output, as_optional(grad_sum), s.input, s.normalized_shape, s.rstd,
        as_optional(s.weight), s.wanted, /*recompute_output=*/false, s.zero_centered_weight);
    return {dsum, dsum, Tensor(), dweight, Tensor(), Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& input, const Tensor& residual,
                                        c10::SymIntArrayRef normalized_shape,
                                        const OptionalTensor& weight, std::optional<double> eps,
                                        bool zero_centered_weight) {
  if (needs_node(input, residual, weight)) {
    const variable_list outputs = apply_saving_output<AddRmsNorm>(
        input, residual, normalized_shape, weight, eps, zero_centered_weight);
    return {outputs[0], outputs[1]};
  }
  static const auto op = find_op<AddRmsNormPublic>("memopt::add_rms_norm");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(input, residual, normalized_shape, weight, eps, zero_centered_weight);
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, Autograd, m) {
  m.impl("add_layer_norm", add_layer_norm);
  m.impl("_add_layer_norm_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("_add_layer_norm_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("add_rms_norm", add_rms_norm);
  m.impl("_add_rms_norm_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("_add_rms_norm_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace memopt::autograd
