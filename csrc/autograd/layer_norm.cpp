// layer_norm: saves its input and the two statistics of each row; recomputes the normalised tensor.
//
//   xhat = (input - mean) rstd       g = grad_output weight
//   grad_input  = rstd (g - mean(g) - xhat mean(g xhat))
//   grad_weight = sum(grad_output xhat)       grad_bias = sum(grad_output)
//
// Saved: input, 2 bytes an element in bfloat16, and 8 bytes a row.
#include "layer_norm.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <tuple>

#include "recipe.h"

namespace memopt::autograd {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

using Public = Tensor(const Tensor&, c10::SymIntArrayRef, const OptionalTensor&,
                      const OptionalTensor&, double);

}  // namespace

void save(AutogradContext* ctx, const Tensor& input, c10::SymIntArrayRef normalized_shape,
          const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& mean,
          const Tensor& rstd) {
  ctx->save_for_backward({input, value_or_undefined(weight), value_or_undefined(bias), mean, rstd});
  ctx->saved_data["normalized_shape"] = normalized_shape;
}

LayerNormSaved restore(AutogradContext* ctx) {
  const variable_list saved = ctx->get_saved_variables();
  // The node's edges count only the tensors that are there.
  size_t edge = 0;
  std::array<bool, 3> wanted{};
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (saved[i].defined()) wanted[i] = ctx->needs_input_grad(edge++);
  }
  return {saved[0], saved[1], saved[2],
          saved[3], saved[4], ctx->saved_data["normalized_shape"].toSymIntVector(),
          wanted};
}

void remember_layer_norm(const Tensor& output, const Tensor& input,
                         c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                         const OptionalTensor& bias, double eps) {
  remember(output, [&] {
    return Recipe{{input, value_or_undefined(weight), value_or_undefined(bias)},
                  [shape = normalized_shape.vec(), eps](const variable_list& saved) {
                    static const auto op = find_op<Public>("memopt::layer_norm");
                    return op.call(saved[0], shape, as_optional(saved[1]), as_optional(saved[2]),
                                   eps);
                  }};
  });
}

Tensor widen(const Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? tensor : tensor.to(at::kFloat);
}

Widened widen(const LayerNormSaved& saved) {
  const auto optional = [](const Tensor& t) {
    return t.defined() ? OptionalTensor(widen(t)) : std::nullopt;
  };
  return {widen(saved.input), optional(saved.weight), optional(saved.bias)};
}

std::array<Tensor, 3> differentiable_backward(const LayerNormSaved& saved, const Widened& wide,
                                              const Tensor& grad_output) {
  // PyTorch's second derivative takes the bias's part of the gradient for zero where there is no
  // weight: a weight of ones is the same function. Its gradient is not asked for.
  OptionalTensor weight = wide.weight;
  if (!weight.has_value() && wide.bias.has_value()) weight = at::ones_like(*wide.bias);
  const auto grads = at::native_layer_norm_backward_symint(
      widen(grad_output), wide.input, saved.normalized_shape, saved.mean, saved.rstd, weight,
      wide.bias, saved.wanted);
  const auto like = [](const Tensor& grad, const Tensor& owner) {
    return grad.defined() ? grad.to(owner.scalar_type()) : Tensor();
  };
  return {like(std::get<0>(grads), saved.input), like(std::get<1>(grads), saved.weight),
          like(std::get<2>(grads), saved.bias)};
}

namespace {

using Forward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, c10::SymIntArrayRef,
                                                   const OptionalTensor&, const OptionalTensor&,
                                                   double);
using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const Tensor&,
                                                            c10::SymIntArrayRef, const Tensor&,
                                                            const Tensor&, const OptionalTensor&,
                                                            const OptionalTensor&,
                                                            std::array<bool, 3>, bool);

struct LayerNorm : torch::autograd::Function<LayerNorm> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input,
                        c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps) {
    static const auto op = find_op<Forward>("memopt::_layer_norm_forward");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [output, mean, rstd] = op.call(input, normalized_shape, weight, bias, eps);
    save(ctx, input, normalized_shape, weight, bias, mean, rstd);
    remember_layer_norm(output, input, normalized_shape, weight, bias, eps);
    return output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<Backward>("memopt::_layer_norm_backward");
    const LayerNormSaved s = restore(ctx);
    if (at::GradMode::is_enabled()) {
      const auto [dx, dweight, dbias] = differentiable_backward(s, widen(s), grads[0]);
      return {dx, Tensor(), dweight, dbias, Tensor()};
    }
    const auto [dx, dweight, dbias, output] =
        op.call(grads[0], s.input, s.normalized_shape, s.mean, s.rstd, as_optional(s.weight),
                as_optional(s.bias), s.wanted, /*recompute_output=*/false);
    return {dx, Tensor(), dweight, dbias, Tensor()};
  }
};

Tensor layer_norm(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                  const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  if (needs_node(input, weight, bias))
    return LayerNorm::apply(input, normalized_shape, weight, bias, eps);
  static const auto op = find_op<Public>("memopt::layer_norm");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(input, normalized_shape, weight, bias, eps);
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, Autograd, m) {
  m.impl("layer_norm", layer_norm);
  m.impl("_layer_norm_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("_layer_norm_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace memopt::autograd
