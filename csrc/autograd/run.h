// A call of an op: through its node where a gradient is wanted, and past it otherwise.
#pragma once

#include "node.h"
#include "recipe.h"
#include "saves_without_hooks.h"

namespace memopt::autograd {

// Whether a graph node is needed. A forward-mode tangent raises an error that names the op,
// whatever the grad mode: without a node it would be dropped silently.
bool needs_node(const char* op, at::TensorList tensors);

inline bool needs_node(const char* op, const variable_list& inputs, const Linears& behind) {
  const bool for_inputs = needs_node(op, inputs);
  if (behind.weights.empty()) return for_inputs;
  // All of them, for the sake of the error.
  const bool for_weights = needs_node(op, behind.weights);
  return needs_node(op, behind.biases) || for_inputs || for_weights;
}

// The outputs with a node behind them.
template <class Op>
variable_list apply_node(const typename Op::Options& options, const variable_list& inputs,
                         const Linears& behind = {}) {
  const auto node = make_node(OpDerivative<Op>{options, behind.weights.size()});
  node->set_arguments(inputs, behind.weights, behind.biases);
  // Of an op alone: what the registry reads besides, and what it is told when the node has saved.
  RecipeRecorder* recorder = behind.weights.empty() ? recipe_recorder() : nullptr;
  variable_list saved, without_hooks, outputs, others;
  SavesWithoutHooks saves;
  bool shows_saved = false;
  {
    const BelowAutograd below_autograd;
    Produced made = Op::forward(options, inputs, /*for_backward=*/true);
    saved = saved_of<Op>(made, inputs, behind);
    if (recorder != nullptr && recorder->needs_no_hooks(saved)) {
      without_hooks = saved;
      saves.begin();
    } else if (recorder != nullptr && recorder->sees_saved(saved)) {
      shows_saved = true;
      saves.begin();
    } else {
      saves.begin_for_packer(saved);
    }
    if (recorder != nullptr && is_traced(made.output)) recorder = nullptr;
    if (recorder != nullptr)
      recorder->add(made.output, recipe_of<Op>(options, made, without_hooks));
    outputs = apply(behind, made.output);
    others = std::move(made.others);
  }
  const bool for_inputs = any_requires_grad(inputs);
  for (size_t i = 0; i < outputs.size(); ++i) {
    node->add_output(outputs[i], for_inputs || behind.requires_grad(i));
  }
  const bool for_others =
      !others.empty() && any_requires_grad(at::TensorList(inputs).slice(0, Op::kOthersFrom));
  for (Tensor& other : others) {
    node->add_output(other, for_others);
    outputs.push_back(std::move(other));
  }
  node->save(saved);
  const bool is_complete = saves.end(*node);
  if (shows_saved && recorder != nullptr) {
    for (auto& one : node->saved()) recorder->see_saved(node->getptr(), one);
  }
  if (recorder != nullptr) recorder->place(outputs[0], without_hooks);
  if (is_complete) HookedPacker::end_function();
  return outputs;
}

// The op's outputs: its own, or those of the linears behind it; then its others. `name` is what the
// user called, for errors.
template <class Op>
variable_list run(const char* name, const typename Op::Options& options,
                  const variable_list& inputs, const Linears& behind = {}) {
  if (needs_node(name, inputs, behind)) return apply_node<Op>(options, inputs, behind);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Produced made = Op::forward(options, inputs, /*for_backward=*/false);
  variable_list outputs = apply(behind, made.output);
  for (Tensor& other : made.others) outputs.push_back(std::move(other));
  return outputs;
}

// With one linear behind. `input_name` is the first input's.
template <class Op>
Tensor run_with_linear(const char* name, const typename Op::Options& options,
                       const char* input_name, const variable_list& inputs, const Tensor& weight,
                       const OptionalTensor& bias) {
  check_features(name, input_name, inputs[0]);
  const Tensor given_bias = value_or_undefined(bias);
  check_linear(name, "weight", "bias", inputs[0], Op::features(options, inputs), weight,
               given_bias);
  return run<Op>(name, options, inputs, {{weight}, {given_bias}})[0];
}

}  // namespace memopt::autograd
