#include "gated.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>

#include <array>
#include <string_view>
#include <tuple>

#include "../ops/checks.h"
#include "declare.h"
#include "dropout.h"
#include "run.h"

namespace memopt::autograd {
namespace {

using std::string_view;
using Scalar = std::optional<double>;

Tensor plain_unit(const ActivationOptions& o, const variable_list& in) {
  static const auto op = MEMOPT_PRIVATE_OP(_gated_forward);
  return op.call(in[0], in[1], o.activation, o.scalar);
}

// The output and the first gradient are written over the incoming gradient or the reads where these
// are the caller's own.
Reproduced backward_(const ActivationOptions& o, const variable_list& reads, const Tensor& grad,
                     const Request& request) {
  static const auto op = MEMOPT_PRIVATE_OP(_gated_backward_);
  const auto place = [&](bool needed, const Tensor& read) {
    if (!needed) return Tensor();
    return request.may_overwrite_reads && is_ours_alone(read) ? read : at::empty_like(read);
  };
  const Tensor dup = place(request.grads[1], reads[1]), output = place(request.output, reads[0]);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.call(grad, reads[0], reads[1], o.activation, o.scalar, as_optional(dup), as_optional(output));
  return {{grad, dup}, output};
}

Reproduced plain_backward(const ActivationOptions& o, const variable_list& reads,
                          const Tensor& grad, const Request& request) {
  static const auto op = MEMOPT_PRIVATE_OP(_gated_backward);
  const Wanted& w = request.grads;
  const auto [dgate, dup, output] = op.call(grad, reads[0], as_optional(reads[1]), o.activation,
                                            o.scalar, {w[0], w[1]}, request.output);
  return {{dgate, dup}, output};
}

Tensor composed_grad_gate(const ActivationOptions& f, const Tensor& grad, const Tensor& gate,
                          const Tensor& up) {
  return activation_gradient(f, widened(grad).mul(widened(up)), widened(gate))
      .to(gate.scalar_type());
}

Tensor composed_grad_up(const ActivationOptions& f, const Tensor& grad, const Tensor& gate) {
  return widened(grad).mul(activation_value(f, widened(gate))).to(gate.scalar_type());
}

Tensor composed_forward(const ActivationOptions& f, const Tensor& gate, const Tensor& up) {
  return activation_value(f, widened(gate)).mul(widened(up));
}

// The dropout behind, as a step of its own, with the state at hand; differentiable.
Tensor dropped(const ActivationOptions& o, const Tensor& tensor, const variable_list& extras) {
  return o.drops ? drop_again(tensor, extras[0], o.p) : tensor;
}

// Views of gate and up in a packed tensor.
std::array<Tensor, 2> halves_of(const Tensor& input, bool interleaved) {
  const c10::SymInt cols = input.sym_size(-1) / 2;
  const auto half = [&](int64_t i) {
    return interleaved ? input.slice_symint(-1, i, std::nullopt, 2)
                       : input.narrow_symint(-1, i * cols, cols);
  };
  return {half(0), half(1)};
}

}  // namespace

void GatedOp::drop_unread(variable_list* reads) {
  if (!(*reads)[0].requires_grad()) (*reads)[1] = Tensor();
}

Produced GatedOp::forward(const Options& o, const variable_list& in, bool for_backward,
                          bool in_place) {
  Tensor output;
  if (in_place && may_overwrite(in[0], in[1])) {
    static const auto op = MEMOPT_PRIVATE_OP(_gated_forward_);
    op.call(in[0], in[1], o.activation, o.scalar);
    output = in[0];
  } else {
    output = plain_unit(o, in);
  }
  if (!o.drops) return {std::move(output), in, {}, {}};
  Produced kept = DropoutOp::forward({o.p}, {output}, for_backward);
  return {std::move(kept.output), in, std::move(kept.extras), {}};
}

Tensor GatedOp::forward_again(const Options& o, const variable_list& reads,
                              const variable_list& extras) {
  return dropped(o, plain_unit(o, reads), extras);
}

Reproduced GatedOp::backward(const Options& o, const variable_list& reads,
                             const variable_list& extras, const variable_list& grads,
                             const Request& request) {
  Reproduced made;
  if (o.drops) {
    made = plain_backward(o, reads, dropped(o, grads[0], extras), request);
  } else if (request.grads[0] && request.may_overwrite_grads &&
             may_overwrite(grads[0], reads[0], reads[1])) {
    made = backward_(o, reads, grads[0], request);
  } else {
    made = plain_backward(o, reads, grads[0], request);
  }
  if (o.drops) made.output = dropped(o, made.output, extras);
  return made;
}

variable_list GatedOp::differentiable_backward(const Options& o, const variable_list& reads,
                                               const variable_list& extras,
                                               const variable_list& grads, const Wanted& wanted) {
  const Tensor grad = dropped(o, grads[0], extras);
  return {wanted[0] ? composed_grad_gate(o, grad, reads[0], reads[1]) : Tensor(),
          wanted[1] ? composed_grad_up(o, grad, reads[0]) : Tensor()};
}

Tensor GatedOp::differentiable_forward(const Options& o, const variable_list& reads,
                                       const variable_list& extras) {
  return dropped(o, composed_forward(o, reads[0], reads[1]), extras).to(reads[0].scalar_type());
}

Produced GatedPackedOp::forward(const Options& o, const variable_list& in, bool) {
  return {forward_again(o, in, {}), in, {}, {}};
}

Tensor GatedPackedOp::forward_again(const Options& o, const variable_list& reads,
                                    const variable_list&) {
  static const auto op = MEMOPT_PRIVATE_OP(_gated_packed_forward);
  return op.call(reads[0], o.f.activation, o.f.scalar, o.interleaved);
}

Reproduced GatedPackedOp::backward(const Options& o, const variable_list& reads,
                                   const variable_list&, const variable_list& grads,
                                   const Request& request) {
  static const auto op = MEMOPT_PRIVATE_OP(_gated_packed_backward);
  const auto [dx, output] =
      op.call(grads[0], reads[0], o.f.activation, o.f.scalar, o.interleaved, request.output);
  return {{dx}, output};
}

variable_list GatedPackedOp::differentiable_backward(const Options& o, const variable_list& reads,
                                                     const variable_list&,
                                                     const variable_list& grads, const Wanted&) {
  const auto [gate, up] = halves_of(reads[0], o.interleaved);
  const std::array<Tensor, 2> both = {composed_grad_gate(o.f, grads[0], gate, up),
                                      composed_grad_up(o.f, grads[0], gate)};
  return {o.interleaved ? at::stack(both, -1).flatten(-2) : at::cat(both, -1)};
}

Tensor GatedPackedOp::differentiable_forward(const Options& o, const variable_list& reads,
                                             const variable_list&) {
  const auto [gate, up] = halves_of(reads[0], o.interleaved);
  return composed_forward(o.f, gate, up).to(gate.scalar_type());
}

namespace {

ActivationOptions options(string_view activation, Scalar scalar) {
  return {.activation = std::string(activation), .scalar = scalar};
}

Tensor gated(const Tensor& gate, const Tensor& up, string_view activation, Scalar scalar) {
  return run<GatedOp>("gated", options(activation, scalar), {gate, up})[0];
}

Tensor gated_packed(const Tensor& input, string_view activation, bool interleaved, Scalar scalar) {
  return run<GatedPackedOp>("gated_packed", {options(activation, scalar), interleaved}, {input})[0];
}

Tensor gated_linear(const Tensor& gate, const Tensor& up, const Tensor& weight,
                    const OptionalTensor& bias, string_view activation, Scalar scalar) {
  const char* name = activation == "silu" ? "swiglu_linear" : "gated_linear";
  ops::check_activation(name, activation, scalar);
  check_features(name, "gate", gate);
  ops::check_like(name, "up", up, "gate", gate);
  return run_with_linear<GatedOp>(name, options(activation, scalar), "gate", {gate, up}, weight,
                                  bias);
}

Tensor gated_packed_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                           string_view activation, bool interleaved, Scalar scalar) {
  const char* name = "gated_packed_linear";
  ops::check_activation(name, activation, scalar);
  return run_with_linear<GatedPackedOp>(name, {options(activation, scalar), interleaved}, "input",
                                        {input}, weight, bias);
}

MEMOPT_DECLARE(gated, {AutocastTo::kWidest}, {},
               R"(gated(Tensor gate, Tensor up, str activation, float? activation_scalar=None)
                  -> Tensor)");
MEMOPT_DECLARE(gated_packed, {}, {},
               R"(gated_packed(Tensor input, str activation, bool interleaved=False,
                  float? activation_scalar=None) -> Tensor)");
MEMOPT_DECLARE(gated_linear, {AutocastTo::kLow}, {},
               R"(gated_linear(Tensor gate, Tensor up, Tensor weight, Tensor? bias=None, *,
                  str activation, float? activation_scalar=None) -> Tensor)");
MEMOPT_DECLARE(gated_packed_linear, {AutocastTo::kLow}, {},
               R"(gated_packed_linear(Tensor input, Tensor weight, Tensor? bias=None, *,
                  str activation, bool interleaved=False, float? activation_scalar=None)
                  -> Tensor)");

}  // namespace
}  // namespace memopt::autograd
