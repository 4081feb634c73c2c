// The strides that results have: those of PyTorch's own ops, which a model's views rely on.
//
// Element-wise ops keep the order that their inputs' dimensions have in memory (TensorIterator).
// Norms return contiguous tensors, but for an RMSNorm in channels-last (norm.h).
#pragma once

#include <ATen/core/Tensor.h>

namespace memopt::ops {

// The strides of a dense tensor of these sizes whose dimensions are in the order of the inputs'
// strides; the first input that tells two dimensions apart decides about them.
c10::SymDimVector elementwise_strides(c10::SymIntArrayRef sizes,
                                      at::ArrayRef<c10::SymIntArrayRef> inputs);

// Uninitialised: what an element-wise op of PyTorch's allocates for these inputs, which have one
// shape. Dtype and device of the first.
at::Tensor empty_elementwise(at::TensorList inputs);

// Whether neither has gaps or overlaps and their elements follow one another in the same order.
bool in_same_order(const at::Tensor& a, const at::Tensor& b);

// tensor in the memory order of `like`: itself, or a copy.
at::Tensor in_order_of(const at::Tensor& tensor, const at::Tensor& like);

// Where a kernel that writes contiguous tensors writes `result`: there, or to a buffer, which
// deliver() copies. Undefined tensors stay undefined.
at::Tensor contiguous_buffer(const at::Tensor& result);
void deliver(const at::Tensor& buffer, const at::Tensor& result);

// The dimensions of a dense tensor, the longest stride first: permuted so, it is contiguous.
at::DimVector memory_order(const at::Tensor& dense);

// Channels-last strides, and not those of a contiguous tensor.
bool is_channels_last(const at::Tensor& tensor);

}  // namespace memopt::ops
