#include "tensors.h"

#include <ATen/ops/empty_like.h>

#include <ATen/TensorUtils.h>
#include <c10/util/Exception.h>

namespace memopt::ops {

kernels::ScalarType scalar_type(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kHalf:
      return kernels::ScalarType::kHalf;
    case at::kBFloat16:
      return kernels::ScalarType::kBFloat16;
    case at::kDouble:
      return kernels::ScalarType::kDouble;
    default:
      return kernels::ScalarType::kFloat;  // checks.h lets nothing else through
  }
}

at::ScalarType accumulate_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

Rows as_rows(const at::Tensor& tensor, int64_t rows, int64_t cols) {
  if (tensor.numel() == 0 || tensor.is_contiguous()) return {tensor, cols};
  const auto strides =
      at::detail::computeStride(tensor.sizes(), tensor.strides(), at::DimVector{rows, cols});
  if (strides.has_value() && ((*strides)[1] == 1 || cols == 1)) return {tensor, (*strides)[0]};
  return {tensor.contiguous(), cols};
}

at::Tensor empty_contiguous(const at::Tensor& tensor) {
  return at::empty_like(tensor, tensor.options(), at::MemoryFormat::Contiguous);
}

at::Tensor contiguous_parameter(const std::optional<at::Tensor>& parameter) {
  if (!parameter.has_value() || !parameter->defined()) return at::Tensor();
  return parameter->contiguous();
}

const void* parameter_data(const char* op, const char* name, const at::Tensor& parameter) {
  const void* data = const_data(parameter);
  TORCH_CHECK(!parameter.defined() || data != nullptr, op, ": ", name,
              " must be in memory, got one whose storage was freed");
  return data;
}

const void* const_data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

void* mutable_data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

}  // namespace memopt::ops
