// PyTorch's group_norm, instance_norm and batch_norm inside a converted model, where memopt's ops
// take them: torch.nn's modules call these, and so does what a SyncBatchNorm does in evaluation or
// for itself alone. (In training across ranks its forward is memopt.nn.SyncBatchNorm's.)
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/batch_norm_ops.h>
#include <ATen/ops/group_norm_ops.h>
#include <ATen/ops/instance_norm_ops.h>
#include <torch/library.h>

#include <cmath>
#include <optional>
#include <string_view>

#include "../autograd/support.h"
#include "../ops/checks.h"
#include "key.h"
#include "taken.h"

namespace memopt::intercept {

namespace {

using at::Tensor;
using c10::DispatchKeySet;
using OptionalTensor = std::optional<Tensor>;
// None stands behind PyTorch's.
using BehindName = std::optional<std::string_view>;
using BehindScalar = std::optional<double>;

bool is_there(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

// Errors are PyTorch's, and so is what becomes of empty tensors.
bool supports_channels(const Tensor& input, const OptionalTensor& weight,
                       const OptionalTensor& bias, double eps) {
  return are_ours() && ops::takes_eps(eps) && supports(input) && input.dim() >= 2 &&
         input.numel() > 0 && supports_parameters(input, input.sym_size(1), {&weight, &bias});
}

int64_t plane(const Tensor& input) {
  return input.numel() / (input.size(0) * input.size(1));
}

// Statistics that are there: plain constants.
bool supports_running(const Tensor& input, const OptionalTensor& mean, const OptionalTensor& var) {
  for (const auto* statistic : {&mean, &var}) {
    if (is_there(*statistic) && (*statistic)->requires_grad()) return false;
  }
  return supports_parameters(input, input.sym_size(1), {&mean, &var});
}

// PyTorch's functions copy what is dense in no order in memory, and save the copy: callers may
// write over their input.
Tensor dense(const Tensor& input) {
  return input.contiguous(input.suggest_memory_format());
}

Tensor group_norm(DispatchKeySet keys, const Tensor& input, int64_t num_groups,
                  const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                  bool cudnn_enabled) {
  const bool ours = supports_channels(input, weight, bias, eps) && !widens_norms(input) &&
                    num_groups > 0 && input.size(1) % num_groups == 0 && input.numel() > num_groups;
  if (!ours) {
    return at::_ops::group_norm::redispatch(below_intercept(keys), input, num_groups, weight, bias,
                                            eps, cudnn_enabled);
  }
  const PassOn pass_on;
  static const auto op =
      autograd::find_op<Tensor(const Tensor&, int64_t, const OptionalTensor&, const OptionalTensor&,
                               double, BehindName, BehindScalar)>("memopt::group_norm");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return op.call(dense(input), num_groups, weight, bias, eps, std::nullopt, std::nullopt);
}

Tensor instance_norm(DispatchKeySet keys, const Tensor& input, const OptionalTensor& weight,
                     const OptionalTensor& bias, const OptionalTensor& running_mean,
                     const OptionalTensor& running_var, bool use_input_stats, double momentum,
                     double eps, bool cudnn_enabled) {
  const bool ours = supports_channels(input, weight, bias, eps) && use_input_stats &&
                    !is_there(running_mean) && !is_there(running_var) && plane(input) > 1;
  if (!ours) {
    return at::_ops::instance_norm::redispatch(below_intercept(keys), input, weight, bias,
                                               running_mean, running_var, use_input_stats, momentum,
                                               eps, cudnn_enabled);
  }
  const PassOn pass_on;
  static const auto op =
      autograd::find_op<Tensor(const Tensor&, const OptionalTensor&, const OptionalTensor&, double,
                               BehindName, BehindScalar)>("memopt::instance_norm");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return op.call(dense(input), weight, bias, eps, std::nullopt, std::nullopt);
}

Tensor batch_norm(DispatchKeySet keys, const Tensor& input, const OptionalTensor& weight,
                  const OptionalTensor& bias, const OptionalTensor& running_mean,
                  const OptionalTensor& running_var, bool training, double momentum, double eps,
                  bool cudnn_enabled) {
  const bool ours =
      supports_channels(input, weight, bias, eps) &&
      supports_running(input, running_mean, running_var) &&
      (training ? input.numel() > input.size(1) : is_there(running_mean) && is_there(running_var));
  if (!ours) {
    return at::_ops::batch_norm::redispatch(below_intercept(keys), input, weight, bias,
                                            running_mean, running_var, training, momentum, eps,
                                            cudnn_enabled);
  }
  const PassOn pass_on;
  static const auto op = autograd::find_op<Tensor(
      const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
      const OptionalTensor&, bool, double, double, BehindName, BehindScalar)>("memopt::batch_norm");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return op.call(input, running_mean, running_var, weight, bias, training, momentum, eps,
                 std::nullopt, std::nullopt);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, DeferredInit, m) {
  m.impl("group_norm", group_norm);
  m.impl("instance_norm", instance_norm);
  m.impl("batch_norm", batch_norm);
}

}  // namespace memopt::intercept
