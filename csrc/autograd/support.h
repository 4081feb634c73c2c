// What every op's Autograd kernel needs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

namespace memopt::autograd {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// A dispatcher handle with a C++ signature. Ops are always called through it, so that modes,
// AOTAutograd and selective checkpointing see them.
template <class Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

inline Tensor value_or_undefined(const OptionalTensor& tensor) {
  return tensor.value_or(Tensor());
}

inline OptionalTensor as_optional(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// Whether a graph node is needed at all. A forward-mode tangent counts, whatever the grad mode:
// Function::apply refuses it by name, where skipping the node would drop it silently.
inline bool records(const Tensor& tensor) {
  if (!tensor.defined()) return false;
  return (at::GradMode::is_enabled() && tensor.requires_grad()) ||
         tensor._fw_grad(/*level=*/0).defined();
}
inline bool records(const OptionalTensor& tensor) {
  return tensor.has_value() && records(*tensor);
}

// Whether a graph is being traced: the tensor is a FakeTensor or its like.
inline bool is_traced(const Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_python_dispatch() ||
         tensor.key_set().has(c10::DispatchKey::Functionalize);
}

// Whether an op may write its results over `ours`, which nobody else holds, where it reads `others`
// beside it. Traced graphs are left to their compiler, which reuses buffers itself.
template <class... Tensors>
bool may_overwrite(const Tensor& ours, const Tensors&... others) {
  return !is_traced(ours) && ours.is_contiguous() && (others.is_contiguous() && ...);
}

template <class... Tensors>
bool needs_node(const Tensors&... tensors) {
  return (records(tensors) || ...);
}

}  // namespace memopt::autograd
