// From tensors to the plain pointers and strides that kernels take.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "../kernels/common.h"

namespace memopt::ops {

kernels::ScalarType scalar_type(const at::Tensor& tensor);

// float32, or float64 for float64: the dtype of statistics and sums.
at::ScalarType accumulate_type(const at::Tensor& tensor);

// A tensor seen as [rows, cols] with unit column stride. `tensor` keeps the memory alive: it is the
// argument itself, or a contiguous copy where its strides allow no such view (transposed,
// expanded).
struct Rows {
  at::Tensor tensor;
  int64_t row_stride;

  const void* data() const { return tensor.const_data_ptr(); }
};
Rows as_rows(const at::Tensor& tensor, int64_t rows, int64_t cols);

// Like `tensor`, uninitialised, and contiguous whatever its strides.
at::Tensor empty_contiguous(const at::Tensor& tensor);

inline bool is_given(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined();
}

// A parameter, contiguous, or an undefined tensor where there is none.
at::Tensor contiguous_parameter(const std::optional<at::Tensor>& parameter);

// A parameter's, null where there is none. One whose storage was freed (sharding does that) must
// not pass for none: `op` and `name` are for the error.
const void* parameter_data(const char* op, const char* name, const at::Tensor& parameter);

// Null for an undefined tensor.
const void* const_data(const at::Tensor& tensor);
void* mutable_data(const at::Tensor& tensor);

}  // namespace memopt::ops
