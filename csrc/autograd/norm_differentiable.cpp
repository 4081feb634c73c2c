// layer_norm:  xhat = (v - mean) rstd      g = grad_output weight
//   grad_v = rstd (g - mean(g) - xhat mean(g xhat))
//   grad_weight = sum(grad_output xhat)    grad_bias = sum(grad_output)
//
// rms_norm:    xhat = v rstd               g = grad_output s, s = weight or 1 + weight
//   grad_v = rstd (g - xhat mean(g xhat))  grad_weight = sum(grad_output xhat)
//
// With GELU behind, grad_output is first multiplied by GELU's derivative at the norm's output.
// All in one dtype (float32, or float64 for float64): `.to` is differentiable, so gradients arrive
// in each argument's own dtype.
#include "norm_differentiable.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/ones_like.h>

#include <limits>

#include "activation.h"

namespace memopt::autograd {
namespace {

Tensor widen(const Tensor& tensor) {
  if (!tensor.defined() || tensor.scalar_type() == at::kDouble) return tensor;
  return tensor.to(at::kFloat);
}

Tensor like(const Tensor& grad, const Tensor& owner) {
  return grad.defined() ? grad.to(owner.scalar_type()) : Tensor();
}

variable_list widen(const variable_list& reads) {
  return {widen(reads[0]), widen(reads[1]), widen(reads[2])};
}

c10::SymIntArrayRef row_of(const NormOp::Options& o, const Tensor& v) {
  return v.sym_sizes().slice(static_cast<size_t>(v.dim() - o.normalized_dims));
}

// LayerNorm's gradients from its statistics.
variable_list layer_norm_backward(const NormOp::Options& o, const variable_list& wide,
                                  const variable_list& extras, const Tensor& dy,
                                  std::array<bool, 3> wanted) {
  // PyTorch's second derivative takes the bias's part of the gradient for zero where there is no
  // weight: a weight of ones is the same function. Its gradient is not asked for.
  Tensor weight = wide[1];
  if (!weight.defined() && wide[2].defined()) weight = at::ones_like(wide[2]);
  wanted = {wanted[0], wanted[1] && wide[1].defined(), wanted[2] && wide[2].defined()};
  const auto [dv, dweight, dbias] =
      at::native_layer_norm_backward_symint(dy, wide[0], row_of(o, wide[0]), extras[0], extras[1],
                                            as_optional(weight), as_optional(wide[2]), wanted);
  return {dv, dweight, dbias};
}

// RMSNorm of v, with rstd computed again, since it moves with v.
struct RmsNorm {
  Tensor rstd;
  Tensor xhat;
  Tensor scale;  // undefined without weight
  std::vector<int64_t> row;
  std::vector<int64_t> leading;

  RmsNorm(const NormOp::Options& o, const variable_list& wide) {
    const Tensor& v = wide[0];
    const double eps =
        o.eps.value_or(v.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                                      : std::numeric_limits<float>::epsilon());
    for (int64_t i = 0; i < o.normalized_dims; ++i) row.push_back(i - o.normalized_dims);
    for (int64_t i = 0; i < v.dim() - o.normalized_dims; ++i) leading.push_back(i);
    rstd = (v * v).mean(row, /*keepdim=*/true).add(eps).rsqrt();
    xhat = v * rstd;
    if (wide[1].defined()) scale = o.zero_centered_weight ? wide[1] + 1 : wide[1];
  }

  Tensor output() const { return scale.defined() ? xhat * scale : xhat; }
};

variable_list rms_norm_backward(const NormOp::Options& o, const variable_list& wide,
                                const Tensor& dy, std::array<bool, 3> wanted) {
  const RmsNorm norm(o, wide);
  Tensor dv, dweight;
  if (wanted[0]) {
    const Tensor g = norm.scale.defined() ? dy * norm.scale : dy;
    dv = norm.rstd * (g - norm.xhat * (g * norm.xhat).mean(norm.row, /*keepdim=*/true));
  }
  if (wanted[1] && wide[1].defined()) {
    const Tensor products = dy * norm.xhat;
    dweight = norm.leading.empty() ? products : products.sum(norm.leading);
  }
  return {dv, dweight, Tensor()};
}

// Without the activation.
Tensor normalized(const NormOp::Options& o, const variable_list& wide) {
  if (o.kind == ops::NormKind::kRmsNorm) return RmsNorm(o, wide).output();
  return at::layer_norm_symint(wide[0], row_of(o, wide[0]), as_optional(wide[1]),
                               as_optional(wide[2]), o.eps.value_or(1e-5));
}

}  // namespace

variable_list differentiable_norm_backward(const NormOp::Options& o, const variable_list& reads,
                                           const variable_list& extras, const Tensor& grad_output,
                                           std::array<bool, 3> wanted) {
  const variable_list wide = widen(reads);
  Tensor dy = widen(grad_output);
  if (!o.activation.empty()) dy = activation_gradient({o.activation}, dy, normalized(o, wide));
  const variable_list grads = o.kind == ops::NormKind::kRmsNorm
                                  ? rms_norm_backward(o, wide, dy, wanted)
                                  : layer_norm_backward(o, wide, extras, dy, wanted);
  return {like(grads[0], reads[0]), like(grads[1], reads[1]), like(grads[2], reads[2])};
}

Tensor differentiable_norm(const NormOp::Options& o, const variable_list& reads) {
  const Tensor z = normalized(o, widen(reads));
  return (o.activation.empty() ? z : activation_value({o.activation}, z))
      .to(reads[0].scalar_type());
}

}  // namespace memopt::autograd
