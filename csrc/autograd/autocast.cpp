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

// The ops that take activations alone: all are cast.
constexpr char kSilu[] = "memopt::silu", kRelu[] = "memopt::relu",
               kQuickGelu[] = "memopt::quick_gelu", kReluSquared[] = "memopt::relu_squared",
               kSigmoid[] = "memopt::sigmoid";

template <c10::DeviceType kDevice, c10::DispatchKey kKey, const char* kOp>
Tensor activation(const Tensor& input) {
  static const auto op = find_op<Tensor(const Tensor&)>(kOp);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  return op.call(cast_input(input, kDevice));
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
Tensor gated(const Tensor& gate, const Tensor& up, std::string_view activation) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, std::string_view)>("memopt::gated");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  return op.call(cast_input(gate, kDevice), cast_input(up, kDevice), activation);
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
Tensor swiglu(const Tensor& gate, const Tensor& up) {
  static const auto op = find_op<Tensor(const Tensor&, const Tensor&)>("memopt::swiglu");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  return op.call(cast_input(gate, kDevice), cast_input(up, kDevice));
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
Tensor geglu(const Tensor& gate, const Tensor& up, std::string_view approximate) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, std::string_view)>("memopt::geglu");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  return op.call(cast_input(gate, kDevice), cast_input(up, kDevice), approximate);
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
Tensor gated_packed(const Tensor& input, std::string_view activation, bool interleaved) {
  static const auto op =
      find_op<Tensor(const Tensor&, std::string_view, bool)>("memopt::gated_packed");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  return op.call(cast_input(input, kDevice), activation, interleaved);
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
Tensor swiglu_packed(const Tensor& input, bool interleaved) {
  static const auto op = find_op<Tensor(const Tensor&, bool)>("memopt::swiglu_packed");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  return op.call(cast_input(input, kDevice), interleaved);
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
Tensor geglu_packed(const Tensor& input, bool interleaved, std::string_view approximate) {
  static const auto op =
      find_op<Tensor(const Tensor&, bool, std::string_view)>("memopt::geglu_packed");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  return op.call(cast_input(input, kDevice), interleaved, approximate);
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

std::vector<Tensor> cast_all(at::TensorList tensors, c10::DeviceType device) {
  std::vector<Tensor> cast;
  for (const Tensor& tensor : tensors) cast.push_back(cast_input(tensor, device));
  return cast;
}

OptionalTensor cast_optional(const OptionalTensor& tensor, c10::DeviceType device) {
  if (!tensor.has_value() || !tensor->defined()) return tensor;
  return cast_input(*tensor, device);
}

c10::List<OptionalTensor> cast_all(const c10::List<OptionalTensor>& tensors,
                                   c10::DeviceType device) {
  c10::List<OptionalTensor> cast;
  for (const auto& entry : tensors) {
    cast.push_back(cast_optional(static_cast<OptionalTensor>(entry), device));
  }
  return cast;
}

// The linears behind an op are cast as autocast casts a linear: weights and biases too.
template <c10::DeviceType kDevice, c10::DispatchKey kKey>
std::vector<Tensor> layer_norm_linear(const Tensor& input, const OptionalTensor& norm_weight,
                                      const OptionalTensor& norm_bias, at::TensorList weights,
                                      const c10::List<OptionalTensor>& biases, double eps) {
  using Op = std::vector<Tensor>(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                 at::TensorList, const c10::List<OptionalTensor>&, double);
  static const auto op = find_op<Op>("memopt::layer_norm_linear");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  return op.call(cast_input(input, kDevice), cast_parameter(norm_weight, kDevice),
                 cast_parameter(norm_bias, kDevice), cast_all(weights, kDevice),
                 cast_all(biases, kDevice), eps);
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
std::vector<Tensor> rms_norm_linear(const Tensor& input, const OptionalTensor& norm_weight,
                                    at::TensorList weights, const c10::List<OptionalTensor>& biases,
                                    std::optional<double> eps, bool zero_centered_weight) {
  using Op = std::vector<Tensor>(const Tensor&, const OptionalTensor&, at::TensorList,
                                 const c10::List<OptionalTensor>&, std::optional<double>, bool);
  static const auto op = find_op<Op>("memopt::rms_norm_linear");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  return op.call(cast_input(input, kDevice), cast_parameter(norm_weight, kDevice),
                 cast_all(weights, kDevice), cast_all(biases, kDevice), eps, zero_centered_weight);
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
Tensor activation_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                         std::string_view activation) {
  using Op = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, std::string_view);
  static const auto op = find_op<Op>("memopt::activation_linear");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  return op.call(cast_input(input, kDevice), cast_input(weight, kDevice),
                 cast_optional(bias, kDevice), activation);
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
Tensor gated_linear(const Tensor& gate, const Tensor& up, const Tensor& weight,
                    const OptionalTensor& bias, std::string_view activation) {
  using Op =
      Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, std::string_view);
  static const auto op = find_op<Op>("memopt::gated_linear");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  return op.call(cast_input(gate, kDevice), cast_input(up, kDevice), cast_input(weight, kDevice),
                 cast_optional(bias, kDevice), activation);
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
Tensor gated_packed_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                           std::string_view activation, bool interleaved) {
  using Op = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, std::string_view, bool);
  static const auto op = find_op<Op>("memopt::gated_packed_linear");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  return op.call(cast_input(input, kDevice), cast_input(weight, kDevice),
                 cast_optional(bias, kDevice), activation, interleaved);
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
Tensor mlp(const Tensor& input, const Tensor& up_weight, const OptionalTensor& up_bias,
           const Tensor& down_weight, const OptionalTensor& down_bias,
           const OptionalTensor& gate_weight, const OptionalTensor& gate_bias,
           const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
           std::string_view activation, std::string_view norm, std::optional<double> eps,
           bool zero_centered_weight, double activation_dropout, double dropout, bool residual,
           std::string_view recompute) {
  using Op =
      Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&,
             const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
             const OptionalTensor&, const OptionalTensor&, std::string_view, std::string_view,
             std::optional<double>, bool, double, double, bool, std::string_view);
  static const auto op = find_op<Op>("memopt::mlp");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  return op.call(cast_input(input, kDevice), cast_input(up_weight, kDevice),
                 cast_optional(up_bias, kDevice), cast_input(down_weight, kDevice),
                 cast_optional(down_bias, kDevice), cast_optional(gate_weight, kDevice),
                 cast_optional(gate_bias, kDevice), cast_parameter(norm_weight, kDevice),
                 cast_parameter(norm_bias, kDevice), activation, norm, eps, zero_centered_weight,
                 activation_dropout, dropout, residual, recompute);
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
Tensor activation_dropout(const Tensor& input, double p, std::string_view activation) {
  static const auto op =
      find_op<Tensor(const Tensor&, double, std::string_view)>("memopt::activation_dropout");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  return op.call(cast_input(input, kDevice), p, activation);
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
std::tuple<Tensor, Tensor> dropout_add_layer_norm(const Tensor& input, const Tensor& residual,
                                                  double p, c10::SymIntArrayRef normalized_shape,
                                                  const OptionalTensor& weight,
                                                  const OptionalTensor& bias, double eps) {
  using Op = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, double, c10::SymIntArrayRef,
                                        const OptionalTensor&, const OptionalTensor&, double);
  static const auto op = find_op<Op>("memopt::dropout_add_layer_norm");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  return op.call(cast_input(input, kDevice), cast_input(residual, kDevice), p, normalized_shape,
                 cast_parameter(weight, kDevice), cast_parameter(bias, kDevice), eps);
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
std::tuple<Tensor, Tensor> dropout_add_rms_norm(const Tensor& input, const Tensor& residual,
                                                double p, c10::SymIntArrayRef normalized_shape,
                                                const OptionalTensor& weight,
                                                std::optional<double> eps,
                                                bool zero_centered_weight) {
  using Op = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, double, c10::SymIntArrayRef,
                                        const OptionalTensor&, std::optional<double>, bool);
  static const auto op = find_op<Op>("memopt::dropout_add_rms_norm");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  return op.call(cast_input(input, kDevice), cast_input(residual, kDevice), p, normalized_shape,
                 cast_parameter(weight, kDevice), eps, zero_centered_weight);
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
void register_ops(torch::Library& m) {
  m.impl("gelu", gelu<kDevice, kKey>);
  m.impl("silu", activation<kDevice, kKey, kSilu>);
  m.impl("relu", activation<kDevice, kKey, kRelu>);
  m.impl("quick_gelu", activation<kDevice, kKey, kQuickGelu>);
  m.impl("relu_squared", activation<kDevice, kKey, kReluSquared>);
  m.impl("sigmoid", activation<kDevice, kKey, kSigmoid>);
  m.impl("gated", gated<kDevice, kKey>);
  m.impl("swiglu", swiglu<kDevice, kKey>);
  m.impl("geglu", geglu<kDevice, kKey>);
  m.impl("gated_packed", gated_packed<kDevice, kKey>);
  m.impl("swiglu_packed", swiglu_packed<kDevice, kKey>);
  m.impl("geglu_packed", geglu_packed<kDevice, kKey>);
  m.impl("layer_norm", layer_norm<kDevice, kKey>);
  m.impl("layer_norm_gelu", layer_norm_gelu<kDevice, kKey>);
  m.impl("rms_norm", rms_norm<kDevice, kKey>);
  m.impl("add_layer_norm", add_layer_norm<kDevice, kKey>);
  m.impl("add_rms_norm", add_rms_norm<kDevice, kKey>);
  m.impl("layer_norm_linear", layer_norm_linear<kDevice, kKey>);
  m.impl("rms_norm_linear", rms_norm_linear<kDevice, kKey>);
  m.impl("activation_linear", activation_linear<kDevice, kKey>);
  m.impl("gated_linear", gated_linear<kDevice, kKey>);
  m.impl("gated_packed_linear", gated_packed_linear<kDevice, kKey>);
  m.impl("mlp", mlp<kDevice, kKey>);
  m.impl("activation_dropout", activation_dropout<kDevice, kKey>);
  m.impl("dropout_add_layer_norm", dropout_add_layer_norm<kDevice, kKey>);
  m.impl("dropout_add_rms_norm", dropout_add_rms_norm<kDevice, kKey>);
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, AutocastCPU, m) {
  register_ops<c10::DeviceType::CPU, c10::DispatchKey::AutocastCPU>(m);
}

TORCH_LIBRARY_IMPL(memopt, AutocastCUDA, m) {
  register_ops<c10::DeviceType::CUDA, c10::DispatchKey::AutocastCUDA>(m);
}

}  // namespace memopt::autograd
