// Finds the tensor that a saved one is a cast of: autocast copies a float32 tensor to its dtype in
// front of each matrix product, which saves the copy. The copy's grad_fn tells what was copied.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <optional>

namespace memopt::saved {

// A node's weak pointer, of the kind that this PyTorch has (2.13's nodes count their references).
template <class T>
std::weak_ptr<T> weak(const std::shared_ptr<T>& node) {
  return node;
}
template <class T>
c10::weak_intrusive_ptr<T> weak(const c10::intrusive_ptr<T>& node) {
  return c10::weak_intrusive_ptr<T>(node);
}
using WeakNode = decltype(weak(torch::autograd::Edge().function));

struct Cast {
  at::Tensor copy;  // all of it, where the saved tensor is a view
  torch::autograd::Edge of;
  bool reshaped;  // `of` was viewed in other sizes before, its elements in row-major order
};

// Empty unless `tensor`, or what it is a view of, is the result of a conversion that nothing has
// written since. (What writes through tensor.data is not seen, as autograd does not see it.)
std::optional<Cast> cast_of(const at::Tensor& tensor);

}  // namespace memopt::saved
