#include "norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <array>
#include <string_view>
#include <tuple>

#include "../ops/checks.h"
#include "dropout.h"
#include "norm_differentiable.h"
#include "ownership.h"
#include "random.h"
#include "run.h"

namespace memopt::autograd {
namespace {

using std::string_view;
using Activation = std::optional<string_view>;
using Eps = std::optional<double>;

Activation activation_of(const NormOp::Options& o) {
  return o.activation.empty() ? std::nullopt : Activation(o.activation);
}

using ops::Results4;
using ops::Results5;

Results4 norm_forward(const NormOp::Options& o, const Tensor& input, const Tensor& residual,
                      const Tensor& weight, const Tensor& bias, bool for_backward) {
  static const auto op = MEMOPT_PRIVATE_OP(_norm_forward);
  return op.call(input, as_optional(residual), o.normalized_dims, as_optional(weight),
                 as_optional(bias), o.eps, o.norm(), o.zero_centered_weight, activation_of(o),
                 for_backward);
}

Produced dropout_add_norm_forward(const NormOp::Options& o, const variable_list& in,
                                  bool for_backward) {
  static const auto op = MEMOPT_PRIVATE_OP(_dropout_add_norm_forward);
  const OptionalTensor given = state_to_apply(in[0]);
  auto [output, sum, mean, rstd, drawn] =
      op.call(in[0], in[1], given, o.p, o.normalized_dims, as_optional(in[2]), as_optional(in[3]),
              o.eps, o.norm(), o.zero_centered_weight, for_backward);
  return {output, {sum, in[2], in[3]}, {mean, rstd, given.has_value() ? *given : drawn}, {sum}};
}

// What dropout has multiplied gets its own gradient from the sum's.
Tensor through_dropout(const NormOp::Options& o, const Tensor& dsum, const variable_list& extras) {
  return o.drops ? drop_again(dsum, extras[2], o.p) : dsum;
}

// The sum has the only gradient.
variable_list sum_backward(const NormOp::Options& o, const variable_list& extras,
                           const Tensor& dsum, const Wanted& wanted) {
  return {wanted[0] ? through_dropout(o, dsum, extras) : Tensor(), wanted[1] ? dsum : Tensor(),
          Tensor(), Tensor()};
}

Reproduced dropout_add_norm_backward(const NormOp::Options& o, const variable_list& reads,
                                     const variable_list& extras, const variable_list& grads,
                                     const Request& request) {
  static const auto op = MEMOPT_PRIVATE_OP(_dropout_add_norm_backward);
  const Wanted& w = request.grads;
  auto [dx, dresidual, dweight, dbias, output] =
      op.call(grads[0], as_optional(grads[1]), reads[0], extras[2], o.p, o.normalized_dims,
              as_optional(extras[0]), extras[1], as_optional(reads[1]), as_optional(reads[2]),
              {w[0], w[1], w[2], w[3]}, request.output, o.norm(), o.zero_centered_weight);
  return {{dx, dresidual, dweight, dbias}, output};
}

Reproduced norm_backward(const NormOp::Options& o, const variable_list& reads,
                         const variable_list& extras, const variable_list& grads,
                         std::array<bool, 3> wanted, bool output_again) {
  static const auto op = MEMOPT_PRIVATE_OP(_norm_backward);
  auto [dx, dweight, dbias, output] =
      op.call(grads[0], o.adds ? as_optional(grads[1]) : std::nullopt, reads[0], o.normalized_dims,
              as_optional(extras[0]), extras[1], as_optional(reads[1]), as_optional(reads[2]),
              wanted, output_again, o.norm(), o.zero_centered_weight, activation_of(o));
  return {{dx, dweight, dbias}, output};
}

// The gradient of the input is written over the incoming one.
Reproduced norm_backward_(const NormOp::Options& o, const variable_list& reads,
                          const variable_list& extras, const Tensor& grad, const Request& request) {
  static const auto op = MEMOPT_PRIVATE_OP(_norm_backward_);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto [dweight, dbias, output] =
      op.call(grad, reads[0], o.normalized_dims, as_optional(extras[0]), extras[1],
              as_optional(reads[1]), as_optional(reads[2]), {request.grads[1], request.grads[2]},
              request.output, o.norm(), o.zero_centered_weight, activation_of(o));
  return {{grad, dweight, dbias}, output};
}

}  // namespace

Produced NormOp::forward(const Options& o, const variable_list& in, bool for_backward) {
  if (o.drops) return dropout_add_norm_forward(o, in, for_backward);
  const size_t weight = o.adds ? 2 : 1;
  auto [output, sum, mean, rstd] =
      norm_forward(o, in[0], o.adds ? in[1] : Tensor(), in[weight], in[weight + 1], for_backward);
  if (!o.adds) return {output, in, {mean, rstd}, {}};
  return {output, {sum, in[2], in[3]}, {mean, rstd}, {sum}};
}

Tensor NormOp::forward_again(const Options& o, const variable_list& reads, const variable_list&) {
  return std::get<0>(norm_forward(o, reads[0], Tensor(), reads[1], reads[2],
                                  /*for_backward=*/false));
}

Reproduced NormOp::backward(const Options& o, const variable_list& reads,
                            const variable_list& extras, const variable_list& grads,
                            const Request& request) {
  const Wanted& w = request.grads;
  if (!o.adds) {
    if (w[0] && request.may_overwrite_grads && may_overwrite(grads[0])) {
      return norm_backward_(o, reads, extras, grads[0], request);
    }
    return norm_backward(o, reads, extras, grads, {w[0], w[1], w[2]}, request.output);
  }
  if (!grads[0].defined()) return {sum_backward(o, extras, grads[1], w), Tensor()};
  if (o.drops) return dropout_add_norm_backward(o, reads, extras, grads, request);
  Reproduced made =
      norm_backward(o, reads, extras, grads, {w[0] || w[1], w[2], w[3]}, request.output);
  const Tensor dsum = made.grads[0];
  made.grads[0] = w[0] ? dsum : Tensor();
  made.grads.insert(made.grads.begin() + 1, w[1] ? dsum : Tensor());
  return made;
}

variable_list NormOp::differentiable_backward(const Options& o, const variable_list& reads,
                                              const variable_list& extras,
                                              const variable_list& grads, const Wanted& w) {
  if (!o.adds) return differentiable_norm_backward(o, reads, extras, grads[0], {w[0], w[1], w[2]});
  if (!grads[0].defined()) return sum_backward(o, extras, grads[1], w);
  const variable_list norm =
      differentiable_norm_backward(o, reads, extras, grads[0], {w[0] || w[1], w[2], w[3]});
  const Tensor dsum = norm[0].defined() && grads[1].defined() ? norm[0] + grads[1] : norm[0];
  variable_list all = sum_backward(o, extras, dsum, w);
  all[2] = norm[1];
  all[3] = norm[2];
  return all;
}

Tensor NormOp::differentiable_forward(const Options& o, const variable_list& reads,
                                      const variable_list&) {
  return differentiable_norm(o, reads);
}

int64_t checked_dims(const char* op, const Tensor& input, c10::SymIntArrayRef normalized_shape) {
  ops::check_input(op, "input", input);
  ops::check_normalized_shape(op, input, normalized_shape);
  return static_cast<int64_t>(normalized_shape.size());
}

Tensor run_norm(const char* name, NormOp::Options o, const Tensor& input,
                c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                const OptionalTensor& bias) {
  o.normalized_dims = checked_dims(name, input, normalized_shape);
  return run<NormOp>(name, o, {input, value_or_undefined(weight), value_or_undefined(bias)})[0];
}

std::tuple<Tensor, Tensor> run_add_norm(const char* name, NormOp::Options o, const Tensor& input,
                                        const Tensor& residual,
                                        c10::SymIntArrayRef normalized_shape,
                                        const OptionalTensor& weight, const OptionalTensor& bias) {
  o.adds = true;
  o.normalized_dims = checked_dims(name, input, normalized_shape);
  const variable_list outputs =
      run<NormOp>(name, o, {input, residual, value_or_undefined(weight), value_or_undefined(bias)});
  return {outputs[0], outputs[1]};
}

namespace {

Linears linears_of(at::TensorList weights, const c10::List<OptionalTensor>& biases) {
  Linears behind{weights.vec(), {}};
  for (const auto& entry : biases) {
    behind.biases.push_back(value_or_undefined(static_cast<OptionalTensor>(entry)));
  }
  return behind;
}

}  // namespace

std::vector<Tensor> batched_linears(const Tensor& normed, at::TensorList weights,
                                    const c10::List<OptionalTensor>& biases) {
  return apply(linears_of(weights, biases), normed);
}

std::vector<Tensor> run_norm_linear(const char* name, const NormOp::Options& o, const Tensor& input,
                                    const OptionalTensor& weight, const OptionalTensor& bias,
                                    at::TensorList weights,
                                    const c10::List<OptionalTensor>& biases) {
  check_features(name, "input", input);
  ops::check_parameters(name, input, input.sym_sizes().slice(input.dim() - 1), weight, bias,
                        {"norm_weight", "norm_bias"});
  Linears behind = linears_of(weights, biases);
  check_linears(name, input, input.sym_size(-1), behind);
  return run<NormOp>(name, o, {input, value_or_undefined(weight), value_or_undefined(bias)},
                     behind);
}

}  // namespace memopt::autograd
