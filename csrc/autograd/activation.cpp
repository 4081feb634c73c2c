#include "activation.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/elu_backward.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/hardsigmoid.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/hardswish_backward.h>
#include <ATen/ops/hardtanh.h>
#include <ATen/ops/hardtanh_backward.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/leaky_relu_backward.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tanh_backward.h>
#include <ATen/ops/threshold_backward.h>

#include <tuple>

#include "../ops/checks.h"
#include "declare.h"
#include "dropout.h"
#include "random.h"
#include "run.h"

namespace memopt::autograd {

using std::string_view;
using Scalar = std::optional<double>;
using ops::Results2;

Tensor widened(const Tensor& tensor) {
  const bool narrow = tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
  return narrow ? tensor.to(at::kFloat) : tensor;
}

Tensor activation_value(const ActivationOptions& f, const Tensor& x) {
  const string_view name = f.activation;
  if (name == "gelu") return at::gelu(x, "none");
  if (name == "gelu_tanh") return at::gelu(x, "tanh");
  if (name == "silu") return x.mul(at::sigmoid(x));
  if (name == "relu") return at::relu(x);
  if (name == "quick_gelu") return x.mul(at::sigmoid(x.mul(1.702)));
  if (name == "relu_squared") return at::relu(x).square();
  if (name == "sigmoid") return at::sigmoid(x);
  if (name == "softcap") return at::tanh(x.div(*f.scalar)).mul(*f.scalar);
  if (name == "relu6") return at::hardtanh(x, 0, 6);
  if (name == "leaky_relu") return at::leaky_relu(x, *f.scalar);
  if (name == "elu") return at::elu(x, *f.scalar);
  if (name == "hardsigmoid") return at::hardsigmoid(x);
  if (name == "hardswish") return at::hardswish(x);
  if (name == "mish") return at::mish(x);
  TORCH_INTERNAL_ASSERT(false, "no differentiable form of ", name);
}

Tensor activation_gradient(const ActivationOptions& f, const Tensor& grad, const Tensor& x) {
  const string_view name = f.activation;
  if (name == "gelu") return at::gelu_backward(grad, x, "none");
  if (name == "gelu_tanh") return at::gelu_backward(grad, x, "tanh");
  if (name == "relu") return at::threshold_backward(grad, x, 0);
  if (name == "relu_squared") return at::threshold_backward(grad.mul(x).mul(2), x, 0);
  if (name == "softcap") return at::tanh_backward(grad, at::tanh(x.div(*f.scalar)));
  if (name == "relu6") return at::hardtanh_backward(grad, x, 0, 6);
  if (name == "leaky_relu")
    return at::leaky_relu_backward(grad, x, *f.scalar, /*self_is_result=*/false);
  if (name == "elu") return at::elu_backward(grad, *f.scalar, 1, 1, /*is_result=*/false, x);
  if (name == "hardsigmoid") return grad.mul(x.abs().lt(3)).div(6);
  if (name == "hardswish") return at::hardswish_backward(grad, x);
  if (name == "mish") {
    const Tensor t = at::tanh(at::softplus(x));
    return grad.mul(t.add(x.mul(at::sigmoid(x)).mul(t.square().neg().add(1))));
  }
  const double scale = name == "quick_gelu" ? 1.702 : 1.0;
  const Tensor s = at::sigmoid(x.mul(scale));
  const Tensor ds = s.mul(s.neg().add(1));
  return grad.mul(name == "sigmoid" ? ds : s.add(x.mul(ds), scale));
}

namespace {

Results2 dropout_forward(const ActivationOptions& o, const Tensor& input,
                         const OptionalTensor& state, bool for_backward) {
  static const auto op = MEMOPT_PRIVATE_OP(_activation_dropout_forward);
  return op.call(input, state, o.p, o.activation, o.scalar, for_backward);
}

Tensor plain_forward(const ActivationOptions& o, const Tensor& input) {
  static const auto op = MEMOPT_PRIVATE_OP(_activation_forward);
  return op.call(input, o.activation, o.scalar);
}

}  // namespace

Produced ActivationOp::forward(const Options& o, const variable_list& in, bool for_backward,
                               bool in_place) {
  if (o.drops) {
    const OptionalTensor given = state_to_apply(in[0]);
    const auto [output, drawn] = dropout_forward(o, in[0], given, for_backward);
    return {output, in, {given.has_value() ? *given : drawn}, {}};
  }
  if (!in_place || !may_overwrite(in[0])) return {plain_forward(o, in[0]), in, {}, {}};
  static const auto op = MEMOPT_PRIVATE_OP(_activation_forward_);
  op.call(in[0], o.activation, o.scalar);
  return {in[0], {}, {}, {}};
}

Tensor ActivationOp::forward_again(const Options& o, const variable_list& reads,
                                   const variable_list& extras) {
  if (!o.drops) return plain_forward(o, reads[0]);
  return std::get<0>(dropout_forward(o, reads[0], extras[0], /*for_backward=*/false));
}

Reproduced ActivationOp::backward(const Options& o, const variable_list& reads,
                                  const variable_list& extras, const variable_list& grads,
                                  const Request& request) {
  const Tensor& x = reads[0];
  if (o.drops) {
    static const auto op = MEMOPT_PRIVATE_OP(_activation_dropout_backward);
    const auto [dx, output] =
        op.call(grads[0], x, extras[0], o.p, o.activation, o.scalar, request.output);
    return {{dx}, output};
  }
  if (request.may_overwrite_grads && may_overwrite(grads[0], x)) {
    static const auto op = MEMOPT_PRIVATE_OP(_activation_backward_);
    Tensor output;
    if (request.output) {
      const bool over_x = request.may_overwrite_reads && is_ours_alone(x);
      output = over_x ? x : at::empty_like(x);
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    op.call(grads[0], x, o.activation, o.scalar, as_optional(output));
    return {{grads[0]}, output};
  }
  static const auto op = MEMOPT_PRIVATE_OP(_activation_backward);
  const auto [dx, output] = op.call(grads[0], x, o.activation, o.scalar, request.output);
  return {{dx}, output};
}

variable_list ActivationOp::differentiable_backward(const Options& o, const variable_list& reads,
                                                    const variable_list& extras,
                                                    const variable_list& grads, const Wanted&) {
  Tensor grad = widened(grads[0]);
  if (o.drops) grad = drop_again(grad, extras[0], o.p);
  return {activation_gradient(o, grad, widened(reads[0])).to(reads[0].scalar_type())};
}

Tensor ActivationOp::differentiable_forward(const Options& o, const variable_list& reads,
                                            const variable_list& extras) {
  Tensor value = activation_value(o, widened(reads[0]));
  if (o.drops) value = drop_again(value, extras[0], o.p);
  return value.to(reads[0].scalar_type());
}

namespace {

Tensor activation(const Tensor& input, string_view activation, Scalar scalar) {
  const ActivationOptions o{.activation = std::string(activation), .scalar = scalar};
  return run<ActivationOp>("activation", o, {input})[0];
}

Tensor activation_dropout(const Tensor& input, double p, string_view activation, Scalar scalar) {
  const ActivationOptions o{std::string(activation), scalar, /*drops=*/true, p};
  return run<ActivationOp>("activation_dropout", o, {input})[0];
}

Tensor activation_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                         string_view activation, Scalar scalar) {
  const bool is_gelu = activation == "gelu" || activation == "gelu_tanh";
  const char* name = is_gelu ? "gelu_linear" : "activation_linear";
  ops::check_activation(name, activation, scalar);
  const ActivationOptions o{.activation = std::string(activation), .scalar = scalar};
  return run_with_linear<ActivationOp>(name, o, "input", {input}, weight, bias);
}

MEMOPT_DECLARE(activation, {}, {},
               R"(activation(Tensor input, str activation, float? activation_scalar=None)
                  -> Tensor)");
MEMOPT_DECLARE(activation_dropout, {}, kDrawsRandomNumbers,
               R"(activation_dropout(Tensor input, float p=0.5, *, str activation,
                  float? activation_scalar=None) -> Tensor)");
MEMOPT_DECLARE(activation_linear, {AutocastTo::kLow}, {},
               R"(activation_linear(Tensor input, Tensor weight, Tensor? bias=None, *,
                  str activation, float? activation_scalar=None) -> Tensor)");

}  // namespace
}  // namespace memopt::autograd
