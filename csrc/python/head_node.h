// The place of a lazy tensor in the graph, for code that gets it without its function.
//
// A torch.autograd.Function would do, but its context, and the call of its forward from C++, took
// the host three times as long.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/function.h>

#include <optional>

namespace memopt::python {

// Gives lazy logits a node behind the tensors that they are made of. `call` has the methods
//   gradients(steps, grad, wanted) -> the gradients of the three, or None
//   hooked(hook): a hook is put on the node
// Neither it nor `steps` may hold the tensor, which Python's collector would not find behind a
// node.
void place_in_graph(const at::Tensor& logits, const at::Tensor& input, const at::Tensor& weight,
                    const std::optional<at::Tensor>& bias, const pybind11::object& call,
                    const pybind11::object& steps);

bool is_head_node(const torch::autograd::Node* node);

// Whether a tensor still has the node that it was given: an autograd Function that writes it gives
// it another one.
bool is_in_place(const at::Tensor& logits);

}  // namespace memopt::python
