// mlp: norm -> linear (or a gate's and an up's) -> activation or gated unit -> linear, as one node.
//
//   n = norm(x)    p_i = n W_i^T + b_i    a = f(p)    y = drop(a V^T + c) + x
//
// norm, dropouts and the added x may be missing. By the option `recompute`, saved for backward in
// bfloat16, with h features and m of the hidden ones (g = 2 linears in front of a gated unit, else
// 1), beside the norm's statistics and 16 bytes for each dropout:
//
//   none         x, n, p, a   (4 h + 2 (g + 1) m) bytes a row
//   activations  x, p         (2 h + 2 g m)          backward's kernels write n and a again
//   all          x            2 h                    and p comes from the first product again
//
//   dy_kept = drop(dy)                                               V's input gradient: da
//   one kernel: dp_i from da and p, and a written again              dV = dy_kept^T a
//   dn = sum of dp_i W_i; one kernel: dx from dn and x, and n again  dW_i = dp_i^T n
//
// Each buffer goes as soon as its product is done; dp is written over da, dx over dn and, where p
// was made again, a over p. Gradients have the same bits at every level, for contiguous input
// those of the ops one after another. Levels: Karpathy's llm.c (-r), Dao's FusedMLP in
// flash-attention (checkpoint_lvl).
#include "mlp.h"

#include <string>

#include "activation.h"
#include "declare.h"
#include "dropout.h"
#include "gated.h"
#include "norm.h"
#include "run.h"

namespace memopt::autograd {
namespace {

NormOp::Options norm_options(const MlpOptions& o) {
  return {.kind = o.norm.value(),
          .eps = o.norm == ops::NormKind::kLayerNorm ? o.eps.value_or(1e-5) : o.eps,
          .zero_centered_weight = o.zero_centered_weight};
}

ActivationOptions activation_options(const MlpOptions& o) {
  return {o.activation, o.activation_scalar, /*drops=*/o.activation_dropout > 0.0,
          o.activation_dropout};
}

// Calls f(op) for the activation or the gated unit.
template <class F>
auto with_activation(const MlpOptions& o, F&& f) {
  return o.gated ? f(GatedOp{}) : f(ActivationOp{});
}

Produced normalize(const MlpOptions& o, const variable_list& in, bool for_backward) {
  if (!o.norm.has_value()) return {in[0], {}, {}, {}};
  return NormOp::forward(norm_options(o), in, for_backward);
}

Produced activate(const MlpOptions& o, const variable_list& pre, bool for_backward, bool in_place) {
  return with_activation(
      o, [&](auto op) { return op.forward(activation_options(o), pre, for_backward, in_place); });
}

// What forward may keep beside the arguments; undefined where it does not.
struct Kept {
  variable_list norm_extras;  // two
  Tensor n;
  variable_list p;  // as many as first linears
  Tensor a;
  Tensor activation_state;
  Tensor output_state;

  void append_to(variable_list* saved, size_t linears) const {
    variable_list all = norm_extras;
    all.resize(2);
    all.push_back(n);
    all.insert(all.end(), p.begin(), p.end());
    all.resize(3 + linears);
    all.insert(all.end(), {a, activation_state, output_state});
    saved->insert(saved->end(), all.begin(), all.end());
  }

  static Kept from(const variable_list& saved, size_t first, size_t linears) {
    const auto begin = saved.begin() + static_cast<std::ptrdiff_t>(first);
    const auto p = begin + 3, rest = p + static_cast<std::ptrdiff_t>(linears);
    return {{begin, begin + 2}, begin[2], {p, rest}, rest[0], rest[1], rest[2]};
  }
};

Tensor run_forward(const MlpOptions& o, const MlpTensors& t, const MlpNeeds& needs,
                   bool for_backward, Kept* kept) {
  Produced normed = normalize(o, t.norm_inputs(), needs.norm_extras);
  kept->norm_extras = std::move(normed.extras);
  if (needs.n) kept->n = normed.output;
  variable_list p = autograd::apply(t.first, normed.output);
  normed = {};
  if (needs.p) kept->p = p;
  Produced activated = activate(o, p, for_backward, /*in_place=*/!needs.p);
  activated.reads.clear();
  p.clear();
  if (!activated.extras.empty()) kept->activation_state = activated.extras[0];
  if (needs.a) kept->a = activated.output;
  Tensor y = autograd::apply(t.down, activated.output)[0];
  activated = {};
  if (o.dropout > 0.0) {
    Produced dropped = DropoutOp::forward({o.dropout}, {std::move(y)}, for_backward);
    y = std::move(dropped.output);
    if (for_backward) kept->output_state = dropped.extras[0];
  }
  return o.residual ? add_to(std::move(y), t.x) : y;
}

// One run of backward. What was kept comes in `kept` and is released when it has been used; the
// gradients come out in `d`.
struct MlpBackward {
  const MlpOptions& o;
  const MlpTensors& t;
  Kept kept;
  MlpGradients d;
  // create_graph=True: what depends on an argument is computed from it again, by differentiable
  // ops.
  const bool composed = at::GradMode::is_enabled();
  bool p_is_ours = false;

  Tensor normalized() const {
    const variable_list in = t.norm_inputs();
    if (!o.norm.has_value()) return in[0];
    if (composed) return NormOp::differentiable_forward(norm_options(o), in, kept.norm_extras);
    const MakesOutputAgain makes_again;
    return NormOp::forward_again(norm_options(o), in, kept.norm_extras);
  }

  // Forward once more up to p, where p was not kept or must come by differentiable ops.
  void make_p_again() {
    const bool can = t.first.weights[0].defined();
    if (!can || !(d.wants_p || d.wants_down) || (kept.p[0].defined() && !composed)) return;
    if (t.x.defined() && (composed || !kept.n.defined())) kept.n = normalized();
    TORCH_CHECK(kept.n.defined(),
                "mlp: create_graph=True asks for input, which was not saved, because neither "
                "up_weight nor gate_weight nor what a norm reads requires a gradient; call the "
                "ops one after another");
    if (composed) kept.a.reset();
    if (!d.wants_p && kept.a.defined()) return;
    // As forward: at::linear folds leading dimensions by what requires a gradient.
    std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd;
    if (!composed) below_autograd.emplace();
    kept.p = autograd::apply(t.first, kept.n);
    p_is_ours = !composed;
  }

  // From y's gradient: p's, with a on the way, and those of the last linear.
  void through_down(const Tensor& dy) {
    const variable_list extras{kept.activation_state};
    const ActivationOptions options = activation_options(o);
    if (d.wants_p) {
      variable_list da;
      da.push_back(input_grad(dy, t.down.weights));
      with_activation(o, [&](auto op) {
        if (composed) {
          d.p = op.differentiable_backward(options, kept.p, extras, da, d.wanted_p);
          return;
        }
        const bool output = d.wants_down && !kept.a.defined();
        const Request request{d.wanted_p, output, /*may_overwrite_grads=*/true,
                              /*may_overwrite_reads=*/p_is_ours};
        Reproduced made = op.backward(options, kept.p, extras, da, request);
        d.p = std::move(made.grads);
        if (output) kept.a = std::move(made.output);
      });
    }
    if (d.wants_down && !kept.a.defined()) {
      kept.a = with_activation(o, [&](auto op) {
        if (composed) return op.differentiable_forward(options, kept.p, extras);
        const MakesOutputAgain makes_again;
        return op.forward_again(options, kept.p, extras);
      });
    }
    kept.p.clear();
    if (d.wants_down) d.down_weight = weight_grad(dy, kept.a);
    if (d.wants_down_bias) d.down_bias = bias_grad(dy);
    kept.a.reset();
  }

  // From p's gradients: those of the norm and of x, with n on the way. `residual` is what comes to
  // x past everything, undefined if nothing does.
  void through_norm(const Tensor& residual) {
    if (!d.wants_norm) return;
    if (!o.norm.has_value()) {
      // x has the linears' gradients and the residual's in one sum, in autograd's order.
      d.norm = {input_grad(d.p, t.first.weights, residual)};
      return;
    }
    variable_list dn;
    dn.push_back(input_grad(d.p, t.first.weights));
    const variable_list in = t.norm_inputs();
    if (composed) {
      d.norm =
          NormOp::differentiable_backward(norm_options(o), in, kept.norm_extras, dn, d.wanted_norm);
    } else {
      const bool output = d.wants_first_weights && !kept.n.defined();
      const Request request{d.wanted_norm, output, /*may_overwrite_grads=*/true};
      Reproduced made = NormOp::backward(norm_options(o), in, kept.norm_extras, dn, request);
      d.norm = std::move(made.grads);
      if (output) kept.n = std::move(made.output);
    }
    dn.clear();
    if (residual.defined() && d.wanted_norm[0]) {
      d.norm[0] = add_to(std::move(d.norm[0]), residual);
    }
  }

  void through_first() {
    if (d.wants_first_weights && !kept.n.defined()) kept.n = normalized();
    for (size_t i = 0; i < d.p.size(); ++i) {
      if (d.wanted_weights[i]) d.weights[i] = weight_grad(d.p[i], kept.n);
      if (d.wanted_biases[i]) d.biases[i] = bias_grad(d.p[i]);
      d.p[i].reset();
    }
  }
};

struct Mlp {
  MlpOptions o;

  // `recompute` is not among them: what was saved shows it.
  template <class Function, class F>
  static void visit(Function& function, F&& f) {
    const MlpOptions& o = function.o;
    f(o.norm, o.eps, o.zero_centered_weight, o.gated, o.activation, o.activation_scalar,
      o.activation_dropout, o.dropout, o.residual);
  }

  variable_list backward(const variable_list& saved, const variable_list& grads,
                         const Wanted& wanted) const {
    if (!grads[0].defined()) return variable_list(wanted.size());
    const NoAutocast no_autocast;
    const auto arguments = static_cast<std::ptrdiff_t>(wanted.size());
    const MlpTensors t({saved.begin(), saved.begin() + arguments}, o.gated);
    MlpBackward run{o, t, Kept::from(saved, wanted.size(), t.first.weights.size()),
                    MlpGradients(t, [&](size_t i) { return wanted[i]; })};
    run.make_p_again();
    run.through_down(o.dropout > 0.0 ? drop_again(grads[0], run.kept.output_state, o.dropout)
                                     : grads[0]);
    run.through_norm(o.residual ? grads[0] : Tensor());
    run.through_first();
    return run.d.in_order();
  }
};

Tensor run_with_node(const MlpOptions& options, const MlpTensors& t, const variable_list& inputs) {
  const auto node = make_node(Mlp{options});
  node->set_arguments(inputs);
  const MlpNeeds needs = what_backward_needs(options, t);
  Kept kept;
  Tensor y;
  {
    const BelowAutograd below_autograd;
    y = run_forward(options, t, needs, /*for_backward=*/true, &kept);
  }
  if (!needs.norm_extras) kept.norm_extras.clear();
  variable_list saved = t.if_needed(needs);
  kept.append_to(&saved, t.first.weights.size());
  node->add_output(y);
  node->save(saved);
  return y;
}

Tensor mlp(const Tensor& input, const Tensor& up_weight, const OptionalTensor& up_bias,
           const Tensor& down_weight, const OptionalTensor& down_bias,
           const OptionalTensor& gate_weight, const OptionalTensor& gate_bias,
           const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
           std::string_view activation, std::string_view norm, std::optional<double> eps,
           bool zero_centered_weight, double activation_dropout, double dropout, bool residual,
           std::string_view recompute, std::optional<double> activation_scalar) {
  MlpOptions options;
  options.norm = parse_norm(norm);
  options.eps = eps;
  options.zero_centered_weight = zero_centered_weight;
  options.gated = gate_weight.has_value() && gate_weight->defined();
  options.activation = std::string(activation);
  options.activation_scalar = activation_scalar;
  options.activation_dropout = activation_dropout;
  options.dropout = dropout;
  options.residual = residual;
  options.recompute = parse_recompute(recompute);
  variable_list inputs{input, value_or_undefined(norm_weight), value_or_undefined(norm_bias)};
  if (options.gated) inputs.push_back(*gate_weight);
  inputs.push_back(up_weight);
  if (options.gated) inputs.push_back(value_or_undefined(gate_bias));
  inputs.insert(inputs.end(),
                {value_or_undefined(up_bias), down_weight, value_or_undefined(down_bias)});
  const MlpTensors tensors(inputs, options.gated);
  check(options, tensors, gate_bias);
  if (needs_node("mlp", inputs)) return run_with_node(options, tensors, inputs);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Kept nothing;
  return run_forward(options, tensors, {}, /*for_backward=*/false, &nothing);
}

const Autocast kAutocast{AutocastTo::kLow, {"norm_weight", "norm_bias"}};

MEMOPT_DECLARE(mlp, kAutocast, kDrawsRandomNumbers,
               R"(mlp(Tensor input, Tensor up_weight, Tensor? up_bias, Tensor down_weight,
                  Tensor? down_bias, Tensor? gate_weight=None, Tensor? gate_bias=None,
                  Tensor? norm_weight=None, Tensor? norm_bias=None, *, str activation="gelu",
                  str norm="none", float? eps=None, bool zero_centered_weight=False,
                  float activation_dropout=0., float dropout=0., bool residual=False,
                  str recompute="activations", float? activation_scalar=None) -> Tensor)");

}  // namespace
}  // namespace memopt::autograd
