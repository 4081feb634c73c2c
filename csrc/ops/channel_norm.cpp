#include "channel_norm.h"

#include <ATen/ops/empty.h>

#include "activation.h"
#include "checks.h"
#include "layout.h"
#include "tensors.h"

namespace memopt::ops {

using at::Tensor;
using kernels::ChannelShape;

ChannelNorm parse_channel_norm(std::string_view kind, int64_t groups, bool backward,
                               const ActivationBehind& activation) {
  const bool over_batch = kind == "batch_norm" || kind == "sync_batch_norm";
  const bool instance = kind == "instance_norm";
  TORCH_CHECK(
      over_batch || instance || kind == "group_norm",
      "norm must be 'group_norm', 'instance_norm', 'batch_norm' or 'sync_batch_norm', got '", kind,
      "'");
  const std::string name = std::string(kind) + (backward ? " backward" : "");
  TORCH_CHECK(activation.name.has_value() || !activation.scalar.has_value(), name,
              ": activation_scalar must be None without an activation, got ", *activation.scalar);
  const kernels::ActivationSpec behind =
      activation.name.has_value()
          ? parse_activation(name.c_str(), *activation.name, activation.scalar)
          : kernels::ActivationSpec{kernels::Activation::kIdentity, 0.0};
  return {name, groups, over_batch, instance, behind};
}

c10::SymDimVector sets_of(const ChannelNorm& norm, const Tensor& input) {
  if (norm.over_batch) return {input.sym_size(1)};
  return {input.sym_size(0), c10::SymInt(norm.groups)};
}

void check_channel_norm(const ChannelNorm& norm, const Tensor& input, const OptionalTensor& weight,
                        const OptionalTensor& bias) {
  check_channels(norm.op(), input, norm.groups);
  const c10::SymInt channels = input.sym_size(1);
  check_parameters(norm.op(), input, channels, weight, bias, {"weight", "bias"}, "channels");
}

void check_statistics_of_sets(const ChannelNorm& norm, const Tensor& input, const char* name,
                              const Tensor& statistics) {
  TORCH_CHECK(statistics.defined(), norm.op(), ": ", name, " must be a tensor, got None");
  const c10::SymDimVector shape = sets_of(norm, input);
  TORCH_CHECK(statistics.scalar_type() == accumulate_type(input) &&
                  statistics.device() == input.device() && statistics.is_contiguous(),
              norm.op(), ": ", name, " must be a contiguous ", accumulate_type(input),
              " tensor on ", input.device(), ", got ", statistics.scalar_type(), " on ",
              statistics.device());
  TORCH_CHECK(statistics.sym_sizes().equals(shape), norm.op(), ": ", name, " must have shape ",
              shape, ", got ", statistics.sym_sizes());
}

at::MemoryFormat order_of(const ChannelNorm& norm, const Tensor& tensor) {
  const bool keeps = !norm.is_instance_norm && is_channels_last(tensor);
  return keeps ? tensor.suggest_memory_format() : at::MemoryFormat::Contiguous;
}

Tensor empty_in_order(const ChannelNorm& norm, const Tensor& input) {
  return at::empty_symint(input.sym_sizes(), input.options(), order_of(norm, input));
}

ChannelShape shape_of(const ChannelNorm& norm, const Tensor& input) {
  ChannelShape shape{input.size(0),
                     input.size(1),
                     c10::multiply_integers(input.sizes().slice(2)),
                     norm.over_batch ? input.size(1) : norm.groups,
                     norm.over_batch,
                     order_of(norm, input) != at::MemoryFormat::Contiguous};
  if (shape.over_batch && (shape.pixels || shape.size == 1)) {
    shape.pixels = true;  // a plane of one element is a pixel
    shape.size *= shape.batch;
    shape.batch = 1;
  }
  return shape;
}

Tensor empty_of(bool wanted, const c10::SymDimVector& shape, const Tensor& input) {
  if (!wanted) return Tensor();
  return at::empty_symint(shape, input.options().dtype(accumulate_type(input)));
}

Tensor wide_parameter(const ChannelNorm& norm, const char* name, const OptionalTensor& parameter,
                      at::ScalarType type) {
  const Tensor contiguous = contiguous_parameter(parameter);
  parameter_data(norm.op(), name, contiguous);
  return contiguous.defined() ? contiguous.to(type) : contiguous;
}

Tensor empty_parts(const ChannelShape& s, int64_t parts, int64_t numbers,
                   const at::TensorOptions& options) {
  return at::empty({parts, numbers, s.pixels ? s.channels : 1}, options);
}

}  // namespace memopt::ops
