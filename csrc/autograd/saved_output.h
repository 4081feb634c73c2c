// For a Function that saves one of its outputs.
//
// Packing what was saved may throw: a checkpointed region stops its recomputation there. PyTorch
// then leaves the output in the node's list of what is to be saved, and the output already has the
// node as its grad_fn: a cycle, which nobody would ever free.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/variable.h>

#include "support.h"

namespace memopt::autograd {

// Function::apply(arguments..., saved_output). Function::forward writes the output that it saves to
// *saved_output, its last argument.
template <class Function, class... Arguments>
torch::autograd::variable_list apply_saving_output(const Arguments&... arguments) {
  Tensor saved_output;
  try {
    return Function::apply(arguments..., &saved_output);
  } catch (...) {
    if (saved_output.defined())
      torch::autograd::impl::set_gradient_edge(saved_output, torch::autograd::Edge());
    throw;
  }
}

}  // namespace memopt::autograd
