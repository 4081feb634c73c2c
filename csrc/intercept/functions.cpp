#include "functions.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/dropout_ops.h>
#include <ATen/ops/layer_norm_ops.h>
#include <ATen/ops/rms_norm_ops.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <vector>

#include "../autograd/ownership.h"
#include "../autograd/support.h"
#include "../ops/checks.h"
#include "../ops/supported.h"
#include "here.h"
#include "key.h"
#include "taken.h"

namespace memopt::intercept {

namespace {

using at::Tensor;
using c10::DispatchKeySet;
using OptionalTensor = std::optional<Tensor>;

// One for each begin_functions() of this thread.
std::vector<std::unique_ptr<Intercept>>& begun() {
  thread_local std::vector<std::unique_ptr<Intercept>> begun;
  return begun;
}

}  // namespace

bool are_wanted_anywhere() {
  return !begun().empty();
}

bool are_ours() {
  return are_wanted_anywhere() || here().functions;
}

bool is_dense(const Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() &&
         !autograd::is_traced(tensor) && !tensor.is_nested() && !tensor.is_conj() &&
         !tensor.is_neg() && !tensor._is_zerotensor() && !tensor._fw_grad(/*level=*/0).defined();
}

bool supports(const Tensor& input) {
  // Set while a transform of torch.func runs.
  constexpr auto kTransform = c10::DispatchKey::FuncTorchDynamicLayerFrontMode;
  return is_dense(input) && ops::takes_dtype(input.scalar_type()) &&
         ops::has_kernels_for(input.device().type()) && !torch::jit::tracer::isTracing() &&
         !c10::impl::tls_is_dispatch_key_included(kTransform);
}

bool supports_parameters(const Tensor& input, c10::SymIntArrayRef shape,
                         std::initializer_list<const OptionalTensor*> parameters) {
  std::optional<at::ScalarType> type;
  for (const auto* parameter : parameters) {
    if (!parameter->has_value() || !(*parameter)->defined()) continue;
    const Tensor& p = **parameter;
    const bool fits = is_dense(p) && p.device() == input.device() && p.sym_sizes().equals(shape) &&
                      ops::takes_parameter(p.scalar_type(), input.scalar_type()) &&
                      p.scalar_type() == type.value_or(p.scalar_type());
    if (!fits) return false;
    type = p.scalar_type();
  }
  return true;
}

bool widens_norms(const Tensor& input) {
  const auto device = input.device().type();
  return is_autocast_on(device) && device != c10::kCPU && input.scalar_type() != at::kFloat;
}

namespace {

// Normalised over the last dimensions, with parameters that the kernels take.
bool supports_norm(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                   std::initializer_list<const OptionalTensor*> parameters) {
  if (!supports(input) || normalized_shape.empty() ||
      static_cast<int64_t>(normalized_shape.size()) > input.dim() || widens_norms(input)) {
    return false;
  }
  const auto sizes = input.sym_sizes();
  if (!sizes.slice(sizes.size() - normalized_shape.size()).equals(normalized_shape)) return false;
  for (const auto& size : normalized_shape) {
    if (size == 0) return false;
  }
  return supports_parameters(input, normalized_shape, parameters);
}

Tensor dropout(DispatchKeySet keys, const Tensor& input, double p, bool train) {
  const bool drops = train && 0.0 < p && p <= 1.0;
  if (!drops || !are_ours() || !supports(input)) {
    return at::_ops::dropout::redispatch(below_intercept(keys), input, p, train);
  }
  const PassOn pass_on;
  static const auto op = autograd::find_op<Tensor(const Tensor&, double)>("memopt::dropout");
  return op.call(input, p);
}

Tensor layer_norm(DispatchKeySet keys, const Tensor& input, c10::SymIntArrayRef normalized_shape,
                  const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                  bool cudnn_enable) {
  if (!are_ours() || !ops::takes_eps(eps) ||
      !supports_norm(input, normalized_shape, {&weight, &bias})) {
    return at::_ops::layer_norm::redispatch(below_intercept(keys), input, normalized_shape, weight,
                                            bias, eps, cudnn_enable);
  }
  const PassOn pass_on;
  static const auto op =
      autograd::find_op<Tensor(const Tensor&, c10::SymIntArrayRef, const OptionalTensor&,
                               const OptionalTensor&, double)>("memopt::layer_norm");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return op.call(input, normalized_shape, weight, bias, eps);
}

Tensor rms_norm(DispatchKeySet keys, const Tensor& input, c10::SymIntArrayRef normalized_shape,
                const OptionalTensor& weight, std::optional<double> eps) {
  if (!are_ours() || !ops::takes_eps(eps.value_or(0.0)) ||
      !supports_norm(input, normalized_shape, {&weight})) {
    return at::_ops::rms_norm::redispatch(below_intercept(keys), input, normalized_shape, weight,
                                          eps);
  }
  const PassOn pass_on;
  static const auto op =
      autograd::find_op<Tensor(const Tensor&, c10::SymIntArrayRef, const OptionalTensor&,
                               std::optional<double>, bool)>("memopt::rms_norm");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return op.call(input, normalized_shape, weight, eps, false);
}

}  // namespace

void begin_functions() {
  begun().push_back(std::make_unique<Intercept>());
}

void end_functions() {
  if (!begun().empty()) begun().pop_back();
}

bool functions_are_paused() {
  return c10::impl::tls_is_dispatch_key_excluded(kInterceptKey);
}

bool pause_functions(bool paused) {
  const bool before = functions_are_paused();
  c10::impl::tls_set_dispatch_key_excluded(kInterceptKey, paused);
  return before;
}

TORCH_LIBRARY_IMPL(aten, DeferredInit, m) {
  m.impl("dropout", dropout);
  m.impl("layer_norm", layer_norm);
  m.impl("rms_norm", rms_norm);
}

}  // namespace memopt::intercept
