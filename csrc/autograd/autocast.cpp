// Under autocast memopt's ops compute in the autocast dtype and return it, with float32 statistics
// inside. PyTorch's own layer_norm returns float32 there, which doubles the bytes that these ops
// exist to save.
//
// Only input (and residual) is cast: a float32 parameter stays as it is (the kernels take it beside
// a 16-bit input). float64 is left alone, as autocast leaves it.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <string_view>
#include <tuple>

#include "support.h"

namespace memopt::autograd {
namespace {

Tensor cast_input(const Tensor& input, c10::DeviceType device) {
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), input, device);
}

OptionalTensor cast_parameter(const OptionalTensor& parameter, c10::DeviceType device) {
  if (!parameter.has_value() || !parameter->defined() || parameter->scalar_type() == at::kFloat)
    return parameter;
  return cast_input(*parameter, device);
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
Tensor gelu(const Tensor& input, std::string_view approximate) {
  static const auto op = find_op<Tensor(const Tensor&, std::string_view)>("memopt::gelu");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  return op.call(cast_input(input, kDevice), approximate);
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
Tensor layer_norm(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                  const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  static const auto op = find_op<Tensor(const Tensor&, c10::SymIntArrayRef, const OptionalTensor&,
                                        const OptionalTensor&, double)>("memopt::layer_norm");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  return op.call(cast_input(input, kDevice), normalized_shape, cast_parameter(weight, kDevice),
                 cast_parameter(bias, kDevice), eps);
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
Tensor layer_norm_gelu(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                       const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                       std::string_view approximate) {
  static const auto op =
      find_op<Tensor(const Tensor&, c10::SymIntArrayRef, const OptionalTensor&,
                     const OptionalTensor&, double, std::string_view)>("memopt::layer_norm_gelu");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  return op.call(cast_input(input, kDevice), normalized_shape, cast_parameter(weight, kDevice),
                 cast_parameter(bias, kDevice), eps, approximate);
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
Tensor rms_norm(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                const OptionalTensor& weight, std::optional<double> eps,
                bool zero_centered_weight) {
  static const auto op = find_op<Tensor(const Tensor&, c10::SymIntArrayRef, const OptionalTensor&,
                                        std::optional<double>, bool)>("memopt::rms_norm");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  return op.call(cast_input(input, kDevice), normalized_shape, cast_parameter(weight, kDevice), eps,
                 zero_centered_weight);
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& input, const Tensor& residual,
                                          c10::SymIntArrayRef normalized_shape,
                                          const OptionalTensor& weight, const OptionalTensor& bias,
                                          double eps) {
  static const auto op =
      find_op<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, c10::SymIntArrayRef,
                                         const OptionalTensor&, const OptionalTensor&, double)>(
          "memopt::add_layer_norm");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  return op.call(cast_input(input, kDevice), cast_input(residual, kDevice), normalized_shape,
                 cast_parameter(weight, kDevice), cast_parameter(bias, kDevice), eps);
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& input, const Tensor& residual,
                                        c10::SymIntArrayRef normalized_shape,
                                        const OptionalTensor& weight, std::optional<double> eps,
                                        bool zero_centered_weight) {
  static const auto op =
      find_op<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, c10::SymIntArrayRef,
                                         const OptionalTensor&, std::optional<double>, bool)>(
          "memopt::add_rms_norm");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  return op.call(cast_input(input, kDevice), cast_input(residual, kDevice), normalized_shape,
                 cast_parameter(weight, kDevice), eps, zero_centered_weight);
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
void register_ops(torch::Library& m) {
  m.impl("gelu", gelu<kDevice, kKey>);
  m.impl("layer_norm", layer_norm<kDevice, kKey>);
  m.impl("layer_norm_gelu", layer_norm_gelu<kDevice, kKey>);
  m.impl("rms_norm", rms_norm<kDevice, kKey>);
  m.impl("add_layer_norm", add_layer_norm<kDevice, kKey>);
  m.impl("add_rms_norm", add_rms_norm<kDevice, kKey>);
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, AutocastCPU, m) {
  register_ops<c10::DeviceType::CPU, c10::DispatchKey::AutocastCPU>(m);
}

TORCH_LIBRARY_IMPL(memopt, AutocastCUDA, m) {
  register_ops<c10::DeviceType::CUDA, c10::DispatchKey::AutocastCUDA>(m);
}

}  // namespace memopt::autograd
