#include "sync_batch_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include <tuple>
#include <utility>

#include "../ops/checks.h"
#include "declare.h"
#include "ownership.h"
#include "run.h"

namespace memopt::autograd {
namespace {

using Options = SyncBatchNormOp::Options;

constexpr const char* kName = "sync_batch_norm";

// A functional collective of PyTorch's and the wait for it. Boxed: the type of the group's name in
// the schema depends on PyTorch's version.
Tensor exchange(const char* name, const Tensor& tensor, c10::IValue second, const Options& o) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  torch::jit::Stack stack{tensor, std::move(second), o.group};
  op.callBoxed(stack);
  static const auto wait = find_op<Tensor(const Tensor&)>("_c10d_functional::wait_tensor");
  return wait.call(stack[0].toTensor());
}

Tensor gather(const Tensor& tensor, const Options& o) {
  return exchange("_c10d_functional::all_gather_into_tensor", tensor, o.ranks, o);
}

Tensor sum_over_ranks(const Tensor& tensor, const Options& o) {
  return exchange("_c10d_functional::all_reduce", tensor, "sum", o);
}

// Of the batch of all ranks, in float64.
struct Statistics {
  Tensor mean;
  Tensor variance;
  Tensor count;  // [1]: of values of a channel
};

Statistics statistics_of_all(const Options& o, const Tensor& input) {
  static const auto op = MEMOPT_PRIVATE_OP(_sync_batch_norm_moments);
  const auto [mean, shift, variance] = op.call(input);
  const c10::SymInt channels = input.sym_size(1);
  c10::SymInt values = input.sym_size(0);
  for (int64_t i = 2; i < input.dim(); ++i) values = values * input.sym_size(i);
  const Tensor count = at::full_symint({1}, values, mean.options().dtype(at::kDouble));
  const Tensor own =
      at::cat({as_type(mean, at::kDouble) + shift, as_type(variance, at::kDouble), count});
  const Tensor all = gather(own, o).view_symint({o.ranks, channels * 2 + 1});

  const Tensor counts = all.narrow_symint(1, channels * 2, 1);
  const Tensor total = counts.sum(0);
  const Tensor parts = counts / total.clamp_min(1);
  const Tensor means = all.narrow_symint(1, 0, channels);
  Tensor mean_of_all = (parts * means).sum(0);
  const Tensor variances = all.narrow_symint(1, channels, channels);
  Tensor variance_of_all = (parts * (variances + (means - mean_of_all).square())).sum(0);
  return {std::move(mean_of_all), std::move(variance_of_all), total};
}

// A batch norm of one value has no variance. All ranks find that out together. On a device it would
// be waited for: there the variance is 0.
void check_more_than_one(const Statistics& all) {
  if (!all.count.is_cpu() || is_traced(all.count)) return;
  TORCH_CHECK(all.count.item<double>() != 1, kName,
              ": input must have more than one value for each channel on all ranks together, got "
              "one");
}

// As PyTorch moves them: the variance without bias. They stay where no rank has a value.
void move_across_ranks(const Options& o, const variable_list& in, const Statistics& all) {
  const auto move = [&](const Tensor& running, const Tensor& own) {
    if (!running.defined()) return;
    const Tensor towards = own.to(running.scalar_type());
    running.lerp_(at::where(all.count > 0, towards, running), o.momentum);
  };
  move(in[3], all.mean);
  move(in[4], all.variance * (all.count / (all.count - 1).clamp_min(1)));
}

}  // namespace

Produced SyncBatchNormOp::forward(const Options& o, const variable_list& in,
                                  bool /*for_backward*/) {
  const variable_list reads(in.begin(), in.begin() + kReads);
  const at::ScalarType type = in[0].scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Statistics all = statistics_of_all(o, in[0]);
  check_more_than_one(all);
  Tensor mean = as_type(all.mean, type);
  Tensor rstd = as_type((all.variance + o.eps).rsqrt(), type);
  Tensor output = forward_again(o, reads, {mean, rstd});
  if (o.running) move_across_ranks(o, in, all);
  return {std::move(output), reads, {std::move(mean), std::move(rstd), all.count}, {}};
}

Reproduced SyncBatchNormOp::backward(const Options& o, const variable_list& reads,
                                     const variable_list& extras, const variable_list& grads,
                                     const Request& request) {
  const Tensor &input = reads[0], &weight = reads[1], &mean = extras[0], &rstd = extras[1];
  const Tensor& count = extras[2];
  static const auto sums = MEMOPT_PRIVATE_OP(_sync_batch_norm_sums);
  auto [sum, product] = sums.call(grads[0], input, mean, rstd);
  Tensor dx;
  if (request.grads[0]) {
    const Tensor own = at::stack({as_type(sum, at::kDouble), as_type(product, at::kDouble)}, 1);
    Tensor means = sum_over_ranks(own, o) / count.clamp_min(1);
    if (weight.defined()) means = means * weight.unsqueeze(1);
    static const auto op = MEMOPT_PRIVATE_OP(_sync_batch_norm_input_gradient);
    dx = op.call(grads[0], input, mean, rstd, as_optional(weight),
                 as_type(means, mean.scalar_type()));
  }
  const auto of_parameter = [&](size_t i, Tensor& gradient) {
    return request.grads[i] ? as_type(gradient, reads[i].scalar_type()) : Tensor();
  };
  Tensor dweight = of_parameter(1, product), dbias = of_parameter(2, sum);
  return {{std::move(dx), std::move(dweight), std::move(dbias)},
          request.output ? forward_again(o, reads, extras) : Tensor()};
}

variable_list SyncBatchNormOp::differentiable_backward(const Options& /*options*/,
                                                       const variable_list& /*reads*/,
                                                       const variable_list& /*extras*/,
                                                       const variable_list& /*grads*/,
                                                       const Wanted& /*wanted*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, kName,
                              ": backward with create_graph=True is not supported across ranks");
}

namespace {

Tensor sync_batch_norm(const Tensor& input, const OptionalTensor& running_mean,
                       const OptionalTensor& running_var, const OptionalTensor& weight,
                       const OptionalTensor& bias, double momentum, double eps, int64_t group_size,
                       std::string_view group_name) {
  TORCH_CHECK(group_size > 0, kName, ": group_size must be positive, got ", group_size);
  check_batch_norm(kName, input, running_mean, running_var);
  ops::check_parameters(kName, input, input.sym_size(1), weight, bias, {"weight", "bias"},
                        "channels");
  ops::check_eps(kName, eps);
  const Tensor mean = value_or_undefined(running_mean), var = value_or_undefined(running_var);
  Options o;
  o.norm = kName;
  o.eps = eps;
  o.running = mean.defined() || var.defined();
  o.momentum = momentum;
  variable_list inputs{input, value_or_undefined(weight), value_or_undefined(bias)};
  if (o.running) inputs.insert(inputs.end(), {mean, var});
  if (group_size == 1) return run<ChannelNormOp>(kName, o, inputs)[0];
  o.ranks = group_size;
  o.group = group_name;
  return run<SyncBatchNormOp>(kName, o, inputs)[0];
}

// Under autocast as batch_norm.
MEMOPT_DECLARE(sync_batch_norm, {}, {},
               R"(sync_batch_norm(Tensor input, Tensor(a!)? running_mean, Tensor(b!)? running_var,
                  Tensor? weight=None, Tensor? bias=None, float momentum=0.1, float eps=1e-05, *,
                  int group_size, str group_name) -> Tensor)");

}  // namespace
}  // namespace memopt::autograd
