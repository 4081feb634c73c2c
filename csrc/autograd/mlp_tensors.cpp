// What mlp.cpp's node is made of: reading, checking and saving its arguments.
#include <string>

#include "../ops/checks.h"
#include "mlp.h"

namespace memopt::autograd {

std::optional<ops::NormKind> parse_norm(std::string_view name) {
  const auto kind = ops::norm_kind(name);
  TORCH_CHECK(kind.has_value() || name == "none",
              "mlp: norm must be 'none', 'layer_norm' or 'rms_norm', got '", name, "'");
  return kind;
}

Recompute parse_recompute(std::string_view name) {
  if (name == "none") return Recompute::kNone;
  if (name == "activations") return Recompute::kActivations;
  if (name == "all") return Recompute::kAll;
  TORCH_CHECK(false, "mlp: recompute must be 'none', 'activations' or 'all', got '", name, "'");
}

MlpTensors::MlpTensors(const variable_list& arguments, bool gated) {
  auto next = arguments.begin();
  x = *next++;
  norm_weight = *next++;
  norm_bias = *next++;
  const int linears = gated ? 2 : 1;
  first.weights.assign(next, next + linears);
  first.biases.assign(next + linears, next + 2 * linears);
  next += 2 * linears;
  down.weights = {*next++};
  down.biases = {*next};
}

variable_list MlpTensors::if_needed(const MlpNeeds& needs) const {
  variable_list saved;
  const auto add = [&](const variable_list& tensors, bool needed) {
    for (const Tensor& tensor : tensors) saved.push_back(needed ? tensor : Tensor());
  };
  add(norm_inputs(), needs.x);
  add(first.weights, needs.first);
  add(first.biases, needs.first);
  add(down.weights, needs.down);
  add(down.biases, false);
  return saved;
}

namespace {

void check_probability(const char* name, double p) {
  // False for NaN.
  TORCH_CHECK_VALUE(p >= 0.0 && p <= 1.0, "mlp: ", name, " must be between 0 and 1, got ", p);
}

}  // namespace

void check(const MlpOptions& o, const MlpTensors& t, const OptionalTensor& gate_bias) {
  const char* op = "mlp";
  check_features(op, "input", t.x);
  ops::check_activation(op, o.activation, o.activation_scalar);
  check_probability("activation_dropout", o.activation_dropout);
  check_probability("dropout", o.dropout);
  TORCH_CHECK(o.gated || !gate_bias.has_value() || !gate_bias->defined(), op,
              ": gate_bias must be None without gate_weight");
  TORCH_CHECK(o.norm.has_value() || (!t.norm_weight.defined() && !t.norm_bias.defined()), op,
              ": norm_weight and norm_bias must be None where norm is 'none'");
  TORCH_CHECK(o.norm != ops::NormKind::kRmsNorm || !t.norm_bias.defined(), op,
              ": norm_bias must be None where norm is 'rms_norm'");
  ops::check_parameters(op, t.x, t.x.sym_sizes().slice(static_cast<size_t>(t.x.dim() - 1)),
                        as_optional(t.norm_weight), as_optional(t.norm_bias),
                        {"norm_weight", "norm_bias"});
  const char* first_names[] = {"gate_weight", "up_weight"};
  const char* first_bias_names[] = {"gate_bias", "up_bias"};
  for (size_t i = 0; i < t.first.weights.size(); ++i) {
    const size_t name = o.gated ? i : 1;
    check_linear(op, first_names[name], first_bias_names[name], t.x, t.x.sym_size(-1),
                 t.first.weights[i], t.first.biases[i]);
  }
  const Tensor& up = t.first.weights.back();
  if (o.gated) {
    TORCH_CHECK(t.first.weights[0].sym_size(0) == up.sym_size(0), op,
                ": gate_weight must have up_weight's ", up.sym_size(0), " rows, got ",
                t.first.weights[0].sym_size(0));
  }
  check_linear(op, "down_weight", "down_bias", t.x, up.sym_size(0), t.down.weights[0],
               t.down.biases[0]);
  if (o.residual) {
    TORCH_CHECK(t.down.weights[0].sym_size(0) == t.x.sym_size(-1), op,
                ": down_weight must have input's ", t.x.sym_size(-1),
                " features as rows where residual is added, got ", t.down.weights[0].sym_size(0));
  }
}

MlpNeeds what_backward_needs(const MlpOptions& o, const MlpTensors& t) {
  const bool has_norm = o.norm.has_value();
  const bool for_norm = any_requires_grad(t.norm_inputs());
  const bool for_weights = any_requires_grad(t.first.weights);
  const bool for_biases = any_requires_grad(t.first.biases);
  const bool for_p = for_norm || for_weights || for_biases;
  const bool for_down = any_requires_grad(t.down.weights);
  const bool keeps_all = o.recompute == Recompute::kNone;
  const bool p_again = o.recompute == Recompute::kAll && (for_p || for_down);
  MlpNeeds needs;
  needs.norm_extras = has_norm && for_norm;
  needs.x = (has_norm && for_norm) || p_again || (for_weights && !(has_norm && keeps_all));
  needs.n = keeps_all && has_norm && (for_weights || (for_biases && !for_norm));
  needs.first = for_p || p_again;
  needs.p = o.recompute != Recompute::kAll && (for_p || (for_down && !keeps_all));
  needs.a = keeps_all && for_down;
  needs.down = for_p;
  return needs;
}

MlpGradients::MlpGradients(const MlpTensors& t, c10::function_ref<bool(size_t)> needed) {
  size_t next = 0;
  const auto take = [&](Wanted* wanted, size_t count) {
    bool any = false;
    for (size_t i = 0; i < count; ++i) {
      wanted->push_back(needed(next++));
      any = any || wanted->back();
    }
    return any;
  };
  const size_t linears = t.first.weights.size();
  wants_norm = take(&wanted_norm, 3);
  wants_first_weights = take(&wanted_weights, linears);
  const bool wants_biases = take(&wanted_biases, linears);
  wants_p = wants_norm || wants_first_weights || wants_biases;
  wants_down = needed(next++);
  wants_down_bias = needed(next);
  for (size_t i = 0; i < linears; ++i)
    wanted_p.push_back(wants_norm || wanted_weights[i] || wanted_biases[i]);
  weights.resize(linears);
  biases.resize(linears);
  p.resize(linears);
}

variable_list MlpGradients::in_order() const {
  variable_list all = norm;
  all.resize(3);
  all.insert(all.end(), weights.begin(), weights.end());
  all.insert(all.end(), biases.begin(), biases.end());
  all.insert(all.end(), {down_weight, down_bias});
  return all;
}

}  // namespace memopt::autograd
