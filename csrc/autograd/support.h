// What every op's Autograd kernel needs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/function.h>

#include <optional>

#include "../ops/private_ops.h"

namespace memopt::autograd {

using at::Tensor;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;
using Wanted = c10::SmallVector<bool, 4>;  // which gradients, in the order of what they belong to

// A dispatcher handle with a C++ signature. Ops are always called through it, so that modes,
// AOTAutograd and selective checkpointing see them.
template <class Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// A private op of ops/private_ops.h, with the arguments that it has there.
#define MEMOPT_PRIVATE_OP(name) find_op<decltype(ops::name)>("memopt::" #name)

inline Tensor value_or_undefined(const OptionalTensor& tensor) {
  return tensor.value_or(Tensor());
}

inline OptionalTensor as_optional(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

inline bool any_requires_grad(at::TensorList tensors) {
  for (const Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.requires_grad()) return true;
  }
  return false;
}

}  // namespace memopt::autograd
