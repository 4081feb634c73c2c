// layer_norm_gelu: saves what layer_norm saves; recomputes the normalised tensor z and the
// activation's derivative.
//
//   z = xhat weight + bias           dz = grad_output gelu'(z)           then layer_norm's formulas
//   with dz
//
// Saved: input, 2 bytes an element in bfloat16, and 8 bytes a row; eager PyTorch saves z as well, 2
// bytes an element.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/layer_norm.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <string>
#include <string_view>
#include <tuple>

#include "layer_norm.h"
#include "recipe.h"

namespace memopt::autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Public = Tensor(const Tensor&, c10::SymIntArrayRef, const OptionalTensor&,
                      const OptionalTensor&, double, std::string_view);
using Forward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, c10::SymIntArrayRef,
                                                   const OptionalTensor&, const OptionalTensor&,
                                                   double, std::string_view);
using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor>(
    const Tensor&, const Tensor&, c10::SymIntArrayRef, const Tensor&, const Tensor&,
    const OptionalTensor&, const OptionalTensor&, std::array<bool, 3>, bool, std::string_view);

// create_graph=True: the same two steps by PyTorch's differentiable formulas, z computed again from
// what was saved.
std::array<Tensor, 3> composed_backward(const LayerNormSaved& saved, double eps,
                                        const std::string& approximate, const Tensor& grad_output) {
  const Widened wide = widen(saved);
  const Tensor z =
      at::layer_norm_symint(wide.input, saved.normalized_shape, wide.weight, wide.bias, eps);
  return differentiable_backward(saved, wide,
                                 at::gelu_backward(widen(grad_output), z, approximate));
}

struct LayerNormGelu : torch::autograd::Function<LayerNormGelu> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input,
                        c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps, std::string_view approximate) {
    static const auto op = find_op<Forward>("memopt::_layer_norm_gelu_forward");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [output, mean, rstd] =
        op.call(input, normalized_shape, weight, bias, eps, approximate);
    save(ctx, input, normalized_shape, weight, bias, mean, rstd);
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["approximate"] = std::string(approximate);
    remember(output, [&] {
      return Recipe{{input, value_or_undefined(weight), value_or_undefined(bias)},
                    [shape = normalized_shape.vec(), eps,
                     approximate = std::string(approximate)](const variable_list& saved) {
                      static const auto again = find_op<Public>("memopt::layer_norm_gelu");
                      return again.call(saved[0], shape, as_optional(saved[1]),
                                        as_optional(saved[2]), eps, approximate);
                    }};
    });
    return output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<Backward>("memopt::_layer_norm_gelu_backward");
    const LayerNormSaved s = restore(ctx);
    const std::string approximate = ctx->saved_data["approximate"].toStringRef();
    if (at::GradMode::is_enabled()) {
      const auto [dx, dweight, dbias] =
          composed_backward(s, ctx->saved_data["eps"].toDouble(), approximate, grads[0]);
      return {dx, Tensor(), dweight, dbias, Tensor(), Tensor()};
    }
    const auto [dx, dweight, dbias, output] =
        op.call(grads[0], s.input, s.normalized_shape, s.mean, s.rstd, as_optional(s.weight),
                as_optional(s.bias), s.wanted, /*recompute_output=*/false, approximate);
    return {dx, Tensor(), dweight, dbias, Tensor(), Tensor()};
  }
};

Tensor layer_norm_gelu(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                       const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                       std::string_view approximate) {
  if (needs_node(input, weight, bias)) {
    return LayerNormGelu::apply(input, normalized_shape, weight, bias, eps, approximate);
  }
  static const auto op = find_op<Public>("memopt::layer_norm_gelu");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(input, normalized_shape, weight, bias, eps, approximate);
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, Autograd, m) {
  m.impl("layer_norm_gelu", layer_norm_gelu);
  m.impl("_layer_norm_gelu_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("_layer_norm_gelu_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace memopt::autograd
