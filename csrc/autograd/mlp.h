// What mlp.cpp's node is made of: its options, its tensors, what it saves and what it is asked for.
#pragma once

#include <c10/util/FunctionRef.h>

#include <string>
#include <string_view>
#include <vector>

#include "../ops/norm_kind.h"
#include "linears.h"
#include "op.h"

namespace memopt::autograd {

enum class Recompute : int64_t { kNone, kActivations, kAll };

struct MlpOptions {
  std::optional<ops::NormKind> norm;
  std::optional<double> eps;
  bool zero_centered_weight = false;
  bool gated = false;
  std::string activation;
  std::optional<double> activation_scalar;
  double activation_dropout = 0.0;
  double dropout = 0.0;
  bool residual = false;
  Recompute recompute = Recompute::kActivations;
};

std::optional<ops::NormKind> parse_norm(std::string_view name);
Recompute parse_recompute(std::string_view name);

struct MlpNeeds;

// The arguments; in a node, those that were saved.
struct MlpTensors {
  Tensor x;
  Tensor norm_weight;
  Tensor norm_bias;
  Linears first;  // gate's, if there is one, then up's
  Linears down;

  // In the order of the members: x, norm's, first's weights, first's biases, down's.
  MlpTensors(const variable_list& arguments, bool gated);
  static size_t count(bool gated) { return gated ? 9 : 7; }

  variable_list norm_inputs() const { return {x, norm_weight, norm_bias}; }
  // In that order again, undefined where not needed.
  variable_list if_needed(const MlpNeeds& needs) const;
};

// Raises an error that names the argument and the rule. gate_bias may be there without a gate.
void check(const MlpOptions& options, const MlpTensors& tensors, const OptionalTensor& gate_bias);

// What backward will need, from what requires a gradient and the level.
struct MlpNeeds {
  bool x = false;  // and the norm's parameters
  bool norm_extras = false;
  bool n = false;
  bool first = false;  // the first linears' weights and biases
  bool p = false;
  bool a = false;
  bool down = false;  // its weight
};
MlpNeeds what_backward_needs(const MlpOptions& options, const MlpTensors& tensors);

// Which gradients a backward is asked for, and these gradients.
struct MlpGradients {
  Wanted wanted_norm;                    // x, norm's weight, bias
  Wanted wanted_weights, wanted_biases;  // of the first linears
  Wanted wanted_p;
  bool wants_norm = false;
  bool wants_first_weights = false;
  bool wants_p = false;
  bool wants_down = false;  // its weight
  bool wants_down_bias = false;

  variable_list norm;  // x, norm's weight, bias: as many as the norm has inputs
  variable_list weights, biases, p;
  Tensor down_weight, down_bias;

  // needed(i): whether argument i needs a gradient.
  MlpGradients(const MlpTensors& tensors, c10::function_ref<bool(size_t)> needed);

  // In the order of the arguments.
  variable_list in_order() const;
};

}  // namespace memopt::autograd
