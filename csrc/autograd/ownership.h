// When an op may write its results over a tensor: only where the tensor is provably ours alone.
//
// Version counters do not show who holds a tensor. So the one rule of all ops is: the reference in
// our hands is the only one to the tensor, and the tensor the only one to its memory; and nothing
// is active that could have kept a value without a reference to the tensor: no dispatch mode (a
// selective checkpoint), no transform of torch.func, no tracer. A traced graph is left to its
// compiler, which reuses buffers itself.
#pragma once

#include <ATen/core/Tensor.h>

namespace memopt::autograd {

// Whether a graph is being traced: the tensor is a FakeTensor or its like.
bool is_traced(const at::Tensor& tensor);

// `tensor` must be the caller's last reference; a copy of it in a container counts as another one.
// references: how many to the tensor are ours.
bool is_ours_alone(const at::Tensor& tensor, size_t references = 1);

// Whether default hooks pack what a node saves now. A hook may keep the tensor, and unpack it.
bool saves_with_hooks();

// In a node's backward, of a tensor that the node saved without hooks and has unpacked: whether
// nobody but the node has it, and this is the node's last run.
bool is_saved_by_us_alone(const at::Tensor& tensor);

// The same, for a kernel that reads `others` beside it, element by element.
template <class... Tensors>
bool may_overwrite(const at::Tensor& ours, const Tensors&... others) {
  return ours.is_contiguous() && (others.is_contiguous() && ...) && is_ours_alone(ours);
}

// ours + other, written over ours where that is allowed. Differentiable under create_graph=True.
at::Tensor add_to(at::Tensor ours, const at::Tensor& other);

}  // namespace memopt::autograd
