// A call of an op: through its node where a gradient is wanted, and past it otherwise.
#pragma once

#include "node.h"

namespace memopt::autograd {

// Whether a graph node is needed. A forward-mode tangent raises an error that names the op,
// whatever the grad mode: without a node it would be dropped silently.
bool needs_node(const char* op, at::TensorList tensors);

inline bool needs_node(const char* op, const Arguments& arguments) {
  const Linears& behind = arguments.behind;
  const bool inputs = needs_node(op, arguments.inputs);
  if (behind.weights.empty()) return inputs;
  // All of them, for the sake of the error.
  const bool weights = needs_node(op, behind.weights);
  return needs_node(op, behind.biases) || inputs || weights;
}

// Function::apply, for a node that may save outputs of its own.
//
// Packing what was saved may throw: a checkpointed region stops its recompute there. PyTorch then
// leaves the output in the node's list of what is to be saved, and the output already has the node
// as its grad_fn: a cycle, which would never be freed.
template <class Op>
variable_list apply_node(const typename Op::Options& options, Arguments& arguments) {
  variable_list storage;
  const at::TensorList given = arguments.given(&storage);
  bool is_complete = false;
  variable_list outputs;
  try {
    outputs = Node<Op>::apply(options, given, arguments);
    is_complete = arguments.without_hooks.end();
    if (recipe_recorder() != nullptr && arguments.behind.weights.empty() &&
        !is_traced(outputs[0])) {
      recipe_recorder()->place(outputs[0], arguments.saved_without_hooks);
    }
  } catch (...) {
    for (const Tensor& output : arguments.saved_outputs) {
      torch::autograd::impl::set_gradient_edge(output, torch::autograd::Edge());
    }
    throw;
  }
  if (is_complete) HookedPacker::end_function();
  return outputs;
}

// The op's outputs: its own, or those of the linears behind it; then its others. `name` is what the
// user called, for errors.
template <class Op>
variable_list run(const char* name, const typename Op::Options& options, variable_list inputs,
                  Linears behind = {}) {
  Arguments arguments(std::move(inputs), std::move(behind));
  if (needs_node(name, arguments)) return apply_node<Op>(options, arguments);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Produced made = Op::forward(options, arguments.inputs, /*for_backward=*/false);
  variable_list outputs = apply(arguments.behind, made.output);
  for (Tensor& other : made.others) outputs.push_back(std::move(other));
  return outputs;
}

// With one linear behind. `input_name` is the first input's.
template <class Op>
Tensor run_with_linear(const char* name, const typename Op::Options& options,
                       const char* input_name, variable_list inputs, const Tensor& weight,
                       const OptionalTensor& bias) {
  check_features(name, input_name, inputs[0]);
  const Tensor given_bias = value_or_undefined(bias);
  check_linear(name, "weight", "bias", inputs[0], Op::features(options, inputs), weight,
               given_bias);
  return run<Op>(name, options, std::move(inputs), {{weight}, {given_bias}})[0];
}

}  // namespace memopt::autograd
