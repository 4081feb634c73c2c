// rms_norm: saves its input and one statistic of each row; recomputes the normalised tensor.
//
//   xhat = input rstd                g = grad_output s, s = weight or 1 + weight
//   grad_input  = rstd (g - xhat mean(g xhat))
//   grad_weight = sum(grad_output xhat)
//
// Saved: input, 2 bytes an element in bfloat16, and 4 bytes a row.
#include "rms_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <limits>
#include <tuple>

#include "recipe.h"

namespace memopt::autograd {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void save_options(AutogradContext* ctx, c10::SymIntArrayRef normalized_shape,
                  std::optional<double> eps, bool zero_centered_weight) {
  ctx->saved_data["normalized_shape"] = normalized_shape;
  ctx->saved_data["eps"] = eps;
  ctx->saved_data["zero_centered_weight"] = zero_centered_weight;
}

void restore_options(AutogradContext* ctx, RmsNormSaved* saved) {
  saved->normalized_shape = ctx->saved_data["normalized_shape"].toSymIntVector();
  saved->eps = ctx->saved_data["eps"].toOptional<double>();
  saved->zero_centered_weight = ctx->saved_data["zero_centered_weight"].toBool();
}

namespace {

// What the differentiable formulas start from, in one dtype.
struct Wide {
  Tensor x;
  Tensor rstd;
  Tensor xhat;
  Tensor scale;  // undefined without weight
  std::vector<int64_t> row;
  std::vector<int64_t> leading;
};

Wide widen(const RmsNormSaved& s) {
  const bool is_double = s.input.scalar_type() == at::kDouble;
  const auto wide = [&](const Tensor& t) { return is_double ? t : t.to(at::kFloat); };
  const double eps = s.eps.value_or(is_double ? std::numeric_limits<double>::epsilon()
                                              : std::numeric_limits<float>::epsilon());
  Wide w;
  const auto normalized_dims = static_cast<int64_t>(s.normalized_shape.size());
  for (int64_t i = 0; i < normalized_dims; ++i) w.row.push_back(i - normalized_dims);
  for (int64_t i = 0; i < s.input.dim() - normalized_dims; ++i) w.leading.push_back(i);
  w.x = wide(s.input);
  w.rstd = (w.x * w.x).mean(w.row, /*keepdim=*/true).add(eps).rsqrt();
  w.xhat = w.x * w.rstd;
  if (s.weight.defined()) {
    w.scale = s.zero_centered_weight ? wide(s.weight) + 1 : wide(s.weight);
  }
  return w;
}

}  // namespace

std::array<Tensor, 2> differentiable_backward(const RmsNormSaved& s, const Tensor& grad_output) {
  const Wide w = widen(s);
  const Tensor dy = grad_output.to(w.x.scalar_type());
  std::array<Tensor, 2> grads;
  if (s.wanted[0]) {
    const Tensor g = w.scale.defined() ? dy * w.scale : dy;
    const Tensor dx = w.rstd * (g - w.xhat * (g * w.xhat).mean(w.row, /*keepdim=*/true));
    grads[0] = dx.to(s.input.scalar_type());
  }
  if (s.wanted[1] && s.weight.defined()) {
    const Tensor products = dy * w.xhat;
    const Tensor dweight = w.leading.empty() ? products : products.sum(w.leading);
    grads[1] = dweight.to(s.weight.scalar_type());
  }
  return grads;
}

void remember_rms_norm(const Tensor& output, const Tensor& input,
                       c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                       std::optional<double> eps, bool zero_centered_weight) {
  remember(output, [&] {
    return Recipe{
        {input, value_or_undefined(weight)},
        [shape = normalized_shape.vec(), eps, zero_centered_weight](const variable_list& saved) {
          static const auto op =
              find_op<Tensor(const Tensor&, c10::SymIntArrayRef, const OptionalTensor&,
                             std::optional<double>, bool)>("memopt::rms_norm");
          return op.call(saved[0], shape, as_optional(saved[1]), eps, zero_centered_weight);
        }};
  });
}

Tensor differentiable_forward(const RmsNormSaved& s) {
  const Wide w = widen(s);
  return (w.scale.defined() ? w.xhat * w.scale : w.xhat).to(s.input.scalar_type());
}

namespace {

using Public = Tensor(const Tensor&, c10::SymIntArrayRef, const OptionalTensor&,
                      std::optional<double>, bool);
using Forward = std::tuple<Tensor, Tensor>(const Tensor&, c10::SymIntArrayRef,
                                           const OptionalTensor&, std::optional<double>, bool);
using Backward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&,
                                                    c10::SymIntArrayRef, const Tensor&,
                                                    const OptionalTensor&, std::array<bool, 2>,
                                                    bool, bool);

struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input,
                        c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                        std::optional<double> eps, bool zero_centered_weight) {
    static const auto op = find_op<Forward>("memopt::_rms_norm_forward");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [output, rstd] = op.call(input, normalized_shape, weight, eps, zero_centered_weight);
    ctx->save_for_backward({input, value_or_undefined(weight), rstd});
    save_options(ctx, normalized_shape, eps, zero_centered_weight);
    remember_rms_norm(output, input, normalized_shape, weight, eps, zero_centered_weight);
    return output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<Backward>("memopt::_rms_norm_backward");
    const variable_list saved = ctx->get_saved_variables();
    RmsNormSaved s{saved[0], saved[1], saved[2]};
    restore_options(ctx, &s);
    s.wanted = {ctx->needs_input_grad(0), s.weight.defined() && ctx->needs_input_grad(1)};
    if (at::GradMode::is_enabled()) {
      const auto [dx, dweight] = differentiable_backward(s, grads[0]);
      return {dx, Tensor(), dweight, Tensor(), Tensor()};
    }
    const auto [dx, dweight, output] =
        op.call(grads[0], s.input, s.normalized_shape, s.rstd, as_optional(s.weight), s.wanted,
                /*recompute_output=*/false, s.zero_centered_weight);
    return {dx, Tensor(), dweight, Tensor(), Tensor()};
  }
};

Tensor rms_norm(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                const OptionalTensor& weight, std::optional<double> eps,
                bool zero_centered_weight) {
  if (needs_node(input, weight))
    return RmsNorm::apply(input, normalized_shape, weight, eps, zero_centered_weight);
  static const auto op = find_op<Public>("memopt::rms_norm");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(input, normalized_shape, weight, eps, zero_centered_weight);
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, Autograd, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("_rms_norm_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("_rms_norm_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace memopt::autograd
