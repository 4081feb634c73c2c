// The norms over channels.
#include "channel_norm.h"

#include <ATen/TensorOperators.h>

#include <array>
#include <tuple>
#include <utility>

#include "../ops/checks.h"
#include "channel_norm_differentiable.h"
#include "declare.h"
#include "run.h"

namespace memopt::autograd {
namespace {

using Options = ChannelNormOp::Options;
using ops::Results4;

std::optional<std::string_view> name_of(const ActivationOptions& f) {
  if (f.activation.empty()) return std::nullopt;
  return f.activation;
}

Results4 forward_by(const Options& o, const variable_list& reads, const OptionalTensor& mean,
                    const OptionalTensor& rstd, bool for_backward, bool with_variance) {
  static const auto op = MEMOPT_PRIVATE_OP(_channel_norm_forward);
  return op.call(reads[0], o.groups, mean, rstd, as_optional(reads[1]), as_optional(reads[2]),
                 o.eps, o.norm, name_of(o.activation), o.activation.scalar, for_backward,
                 with_variance);
}

// As PyTorch moves them: `variance` is without bias.
void move_running(const Options& o, const variable_list& in, const Tensor& mean,
                  const Tensor& variance) {
  const Tensor &running_mean = in[3], &running_var = in[4];
  if (in[0].sym_numel() == 0) return;
  if (running_mean.defined())
    running_mean.lerp_(as_type(mean, running_mean.scalar_type()), o.momentum);
  if (!running_var.defined()) return;
  running_var.lerp_(as_type(variance, running_var.scalar_type()), o.momentum);
}

}  // namespace

Produced ChannelNormOp::forward(const Options& o, const variable_list& in, bool for_backward) {
  const variable_list reads(in.begin(), in.begin() + kReads);
  if (o.given) {
    // Copies: the running statistics may have moved before backward reads them.
    const at::ScalarType type = in[0].scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    Tensor mean = in[3].scalar_type() == type ? in[3].clone() : in[3].to(type);
    Tensor rstd = as_type(in[4], type).add(o.eps).rsqrt_();
    Tensor output = std::get<0>(forward_by(o, reads, mean, rstd, for_backward, false));
    return {std::move(output), reads, {std::move(mean), std::move(rstd)}, {}};
  }
  const bool moves = o.running && (in[3].defined() || in[4].defined());
  auto [output, mean, rstd, variance] =
      forward_by(o, reads, std::nullopt, std::nullopt, for_backward || moves, moves);
  if (moves) move_running(o, in, mean, variance);
  return {std::move(output), reads, {std::move(mean), std::move(rstd)}, {}};
}

Tensor ChannelNormOp::forward_again(const Options& o, const variable_list& reads,
                                    const variable_list& extras) {
  return std::get<0>(forward_by(o, reads, extras[0], extras[1], false, false));
}

Tensor ChannelNormOp::gradient_of_output(const Options& o, const variable_list& reads,
                                         const variable_list& extras, const Tensor& grad) {
  static const auto op = MEMOPT_PRIVATE_OP(_channel_norm_activation_backward);
  return op.call(grad, reads[0], o.groups, extras[0], extras[1], as_optional(reads[1]),
                 as_optional(reads[2]), o.norm, o.activation.activation, o.activation.scalar);
}

Reproduced ChannelNormOp::backward(const Options& o, const variable_list& reads,
                                   const variable_list& extras, const variable_list& grads,
                                   const Request& request) {
  static const auto op = MEMOPT_PRIVATE_OP(_channel_norm_backward);
  const Wanted& w = request.grads;
  auto [dx, dweight, dbias] =
      op.call(grads[0], reads[0], o.groups, extras[0], extras[1], as_optional(reads[1]),
              as_optional(reads[2]), o.given, {w[0], w[1], w[2]}, o.norm, name_of(o.activation),
              o.activation.scalar);
  return {{dx, dweight, dbias}, request.output ? forward_again(o, reads, extras) : Tensor()};
}

variable_list ChannelNormOp::differentiable_backward(const Options& o, const variable_list& reads,
                                                     const variable_list& extras,
                                                     const variable_list& grads, const Wanted& w) {
  return differentiable_channel_norm_backward(o, reads, extras, grads[0], {w[0], w[1], w[2]});
}

Tensor ChannelNormOp::differentiable_forward(const Options& o, const variable_list& reads,
                                             const variable_list& extras) {
  return differentiable_channel_norm(o, reads, extras);
}

void check_batch_norm(const char* op, const Tensor& input, const OptionalTensor& running_mean,
                      const OptionalTensor& running_var) {
  ops::check_channels(op, input, /*num_groups=*/1);
  const c10::SymInt channels = input.sym_size(1);
  ops::check_parameters(op, input, channels, running_mean, running_var,
                        {"running_mean", "running_var"}, "channels");
  for (const OptionalTensor& statistic : {running_mean, running_var}) {
    TORCH_CHECK(!statistic.has_value() || !statistic->defined() || !statistic->requires_grad(), op,
                ": running statistics must not require a gradient");
  }
}

namespace {

using Activation = std::optional<std::string_view>;
using Scalar = std::optional<double>;

ActivationOptions behind(const char* op, Activation name, Scalar scalar) {
  if (!name.has_value()) return {.activation = {}, .scalar = scalar};  // the private op refuses it
  ops::check_activation(op, *name, scalar);
  return {.activation = std::string(*name), .scalar = scalar};
}

Tensor group_norm(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                  const OptionalTensor& bias, double eps, Activation activation, Scalar scalar) {
  constexpr const char* name = "group_norm";
  const Options o{.norm = name,
                  .groups = num_groups,
                  .eps = eps,
                  .activation = behind(name, activation, scalar)};
  ops::check_channels(name, input, num_groups);
  return run<ChannelNormOp>(name, o,
                            {input, value_or_undefined(weight), value_or_undefined(bias)})[0];
}

Tensor instance_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                     double eps, Activation activation, Scalar scalar) {
  constexpr const char* name = "instance_norm";
  ops::check_channels(name, input, /*num_groups=*/1);
  const Options o{.norm = name,
                  .groups = input.sym_size(1).guard_int(__FILE__, __LINE__),
                  .eps = eps,
                  .activation = behind(name, activation, scalar)};
  return run<ChannelNormOp>(name, o,
                            {input, value_or_undefined(weight), value_or_undefined(bias)})[0];
}

Tensor batch_norm(const Tensor& input, const OptionalTensor& running_mean,
                  const OptionalTensor& running_var, const OptionalTensor& weight,
                  const OptionalTensor& bias, bool training, double momentum, double eps,
                  Activation activation, Scalar scalar) {
  constexpr const char* name = "batch_norm";
  check_batch_norm(name, input, running_mean, running_var);
  const Tensor mean = value_or_undefined(running_mean), var = value_or_undefined(running_var);
  TORCH_CHECK(training || (mean.defined() && var.defined()), name,
              ": running_mean and running_var must be given unless training, got ",
              mean.defined() ? "no running_var" : "no running_mean");
  const Options o{.norm = name,
                  .groups = 1,
                  .eps = eps,
                  .given = !training,
                  .running = mean.defined() || var.defined(),
                  .momentum = momentum,
                  .activation = behind(name, activation, scalar)};
  variable_list inputs{input, value_or_undefined(weight), value_or_undefined(bias)};
  if (o.running) inputs.insert(inputs.end(), {mean, var});
  return run<ChannelNormOp>(name, o, inputs)[0];
}

const Autocast kChannelNorm{AutocastTo::kWidest, {"weight", "bias"}};

MEMOPT_DECLARE(group_norm, kChannelNorm, {},
               R"(group_norm(Tensor input, int num_groups, Tensor? weight=None, Tensor? bias=None,
                  float eps=1e-05, *, str? activation=None, float? activation_scalar=None)
                  -> Tensor)");
MEMOPT_DECLARE(instance_norm, kChannelNorm, {},
               R"(instance_norm(Tensor input, Tensor? weight=None, Tensor? bias=None,
                  float eps=1e-05, *, str? activation=None, float? activation_scalar=None)
                  -> Tensor)");
// Under autocast as it is called: a copy of the running statistics would be what moves.
MEMOPT_DECLARE(batch_norm, {}, {},
               R"(batch_norm(Tensor input, Tensor(a!)? running_mean, Tensor(b!)? running_var,
                  Tensor? weight=None, Tensor? bias=None, bool training=False, float momentum=0.1,
                  float eps=1e-05, *, str? activation=None, float? activation_scalar=None)
                  -> Tensor)");

}  // namespace
}  // namespace memopt::autograd
