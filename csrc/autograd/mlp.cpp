// mlp: norm -> linear (or a gate's and an up's) -> activation or gated unit -> linear, as one node.
//
//   n = norm(x)    p_i = n W_i^T + b_i    a = f(p)    y = drop(a V^T + c) + x
//
// norm, dropouts and the added x may be missing. By level of recomputation, saved for backward in
// bfloat16, with h features and m of the hidden ones (g = 2 linears in front of a gated unit, else
// 1), beside the norm's statistics and 16 bytes for each dropout:
//
//   none         x, n, p, a   (4 h + 2 (g + 1) m) bytes a row
//   activations  x, p         (2 h + 2 g m)          backward's kernels write n and a again
//   all          x            2 h                    and p comes by the first product once more
//
//   dy_kept = drop(dy)                                               V's input gradient: da
//   one kernel: dp_i from da and p, and a written again              dV = dy_kept^T a
//   dn = sum of dp_i W_i; one kernel: dx from dn and x, and n again  dW_i = dp_i^T n
//
// Each buffer goes as soon as its product is done; dp is written over da, dx over dn and, where p
// was made again, a over p. Gradients have the same bits at every level, for contiguous input
// those of the ops one after another. Levels: Karpathy's llm.c (-r), Dao's FusedMLP in
// flash-attention (checkpoint_lvl).
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <string>

#include "activation_producers.h"
#include "defined.h"
#include "dropout.h"
#include "linears.h"
#include "mlp.h"
#include "norm_producers.h"

namespace memopt::autograd {
namespace {

// Calls f(producer, its options) for the norm, the activation.
template <class F>
auto with_norm(const MlpOptions& o, F&& f) {
  switch (o.norm) {
    case MlpNorm::kLayerNorm:
      return f(LayerNormProducer{}, LayerNormProducer::Options{o.eps.value_or(1e-5)});
    case MlpNorm::kRmsNorm:
      return f(RmsNormProducer{}, RmsNormProducer::Options{o.eps, o.zero_centered_weight});
    default:
      return f(NoNormProducer{}, NoNormProducer::Options{});
  }
}

template <class F>
auto with_activation(const MlpOptions& o, F&& f) {
  const ActivationOptions options{o.activation, o.activation_dropout};
  return o.gated ? f(GatedProducer{}, options) : f(ActivationProducer{}, options);
}

Produced normalize(const MlpOptions& o, const variable_list& in) {
  return with_norm(o, [&](auto norm, const auto& options) { return norm.forward(options, in); });
}

Produced activate(const MlpOptions& o, const variable_list& pre, bool may_overwrite) {
  return with_activation(o, [&](auto activation, const auto& options) {
    return activation.forward(options, pre, may_overwrite);
  });
}

Tensor sum(const Tensor& ours, const Tensor& other) {
  return at::GradMode::is_enabled() || is_traced(ours) ? ours + other : ours.add_(other);
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

Tensor run_forward(const MlpOptions& o, const MlpTensors& t, const MlpNeeds& needs, Kept* kept) {
  Produced normed = normalize(o, t.norm_inputs());
  kept->norm_extras = normed.extras;
  if (needs.n) kept->n = normed.output;
  variable_list p = autograd::apply(t.first, normed.output);
  normed.output.reset();
  if (needs.p) kept->p = p;
  Produced activated = activate(o, p, /*may_overwrite=*/!needs.p);
  p.clear();
  if (!activated.extras.empty()) kept->activation_state = activated.extras[0];
  if (needs.a) kept->a = activated.output;
  Tensor y = autograd::apply(t.down, activated.output)[0];
  if (o.dropout > 0.0) std::tie(y, kept->output_state) = dropout_forward(y, o.dropout);
  return o.residual ? sum(y, t.x) : y;
}

// One run of backward: what was kept comes in `kept` and goes when it has been used, the gradients
// come out in `d`.
struct MlpBackward {
  const MlpOptions& o;
  const MlpTensors& t;
  Kept kept;
  MlpGradients d;
  // create_graph=True: what depends on an argument comes from it again, by differentiable ops.
  const bool composed = at::GradMode::is_enabled();
  bool p_is_ours = false;

  Tensor normalized() const {
    return with_norm(o, [&](auto norm, const auto& options) {
      return composed ? norm.differentiable_forward(options, t.norm_inputs(), kept.norm_extras)
                      : norm.forward(options, t.norm_inputs()).output;
    });
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
    if (d.wants_p) {
      const Tensor da = input_grad({dy}, t.down.weights);
      with_activation(o, [&](auto activation, const auto& options) {
        if (composed) {
          d.p = activation.differentiable_backward(options, kept.p, extras, da, d.wanted_p);
          return;
        }
        const bool output = d.wants_down && !kept.a.defined();
        Reproduced made =
            activation.backward(options, kept.p, extras, da, {d.wanted_p, output, p_is_ours});
        d.p = std::move(made.grads);
        if (output) kept.a = std::move(made.output);
      });
    }
    if (d.wants_down && !kept.a.defined()) {
      kept.a = with_activation(o, [&](auto activation, const auto& options) {
        return composed ? activation.differentiable_forward(options, kept.p, extras)
                        : activation.forward_again(options, kept.p, extras);
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
    const bool has_norm = o.norm != MlpNorm::kNone;
    // Without a norm x has the linears' gradients and the residual's in one sum, in autograd's
    // order.
    const Tensor dn = input_grad(d.p, t.first.weights, has_norm ? Tensor() : residual);
    with_norm(o, [&](auto norm, const auto& options) {
      if (composed) {
        d.norm = norm.differentiable_backward(options, t.norm_inputs(), kept.norm_extras, dn,
                                              d.wanted_norm);
        return;
      }
      const bool output = d.wants_first_weights && !kept.n.defined();
      Reproduced made =
          norm.backward(options, t.norm_inputs(), kept.norm_extras, dn, {d.wanted_norm, output});
      d.norm = std::move(made.grads);
      if (output) kept.n = std::move(made.output);
    });
    if (has_norm && residual.defined() && d.wanted_norm[0]) d.norm[0] = sum(d.norm[0], residual);
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

struct Mlp : torch::autograd::Function<Mlp> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const MlpOptions& options, at::TensorList given,
                        const std::vector<int64_t>& places) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const MlpTensors t(put_back(given, places), options.gated);
    const MlpNeeds needs = what_backward_needs(options, t);
    Kept kept;
    const Tensor y = run_forward(options, t, needs, &kept);
    if (!needs.norm_extras) kept.norm_extras.clear();
    variable_list saved = t.if_needed(needs);
    kept.append_to(&saved, t.first.weights.size());
    ctx->save_for_backward(saved);
    options.save(ctx);
    ctx->saved_data["places"] = places;
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const NoAutocast no_autocast;
    const MlpOptions o = MlpOptions::restore(ctx);
    const std::vector<int64_t> places = ctx->saved_data["places"].toIntVector();
    const auto arguments = static_cast<std::ptrdiff_t>(places.size());
    const variable_list saved = ctx->get_saved_variables();
    const MlpTensors t({saved.begin(), saved.begin() + arguments}, o.gated);
    MlpBackward run{o, t, Kept::from(saved, places.size(), t.first.weights.size()),
                    MlpGradients(t, [&](size_t i) {
                      return places[i] >= 0 && ctx->needs_input_grad(places[i]);
                    })};
    run.make_p_again();
    run.through_down(o.dropout > 0.0 ? drop_again(grads[0], run.kept.output_state, o.dropout)
                                     : grads[0]);
    run.through_norm(o.residual ? grads[0] : Tensor());
    run.through_first();

    const variable_list all = run.d.in_order();
    variable_list result(1);  // one for each argument of forward and each of `given`
    for (size_t i = 0; i < places.size(); ++i) {
      if (places[i] >= 0) result.push_back(all[i]);
    }
    result.resize(result.size() + 1);
    return result;
  }
};

Tensor mlp(const Tensor& input, const Tensor& up_weight, const OptionalTensor& up_bias,
           const Tensor& down_weight, const OptionalTensor& down_bias,
           const OptionalTensor& gate_weight, const OptionalTensor& gate_bias,
           const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
           std::string_view activation, std::string_view norm, std::optional<double> eps,
           bool zero_centered_weight, double activation_dropout, double dropout, bool residual,
           std::string_view recompute) {
  MlpOptions options;
  options.norm = parse_norm(norm);
  options.eps = eps;
  options.zero_centered_weight = zero_centered_weight;
  options.gated = gate_weight.has_value() && gate_weight->defined();
  options.activation = std::string(activation);
  options.activation_dropout = activation_dropout;
  options.dropout = dropout;
  options.residual = residual;
  options.recompute = parse_recompute(recompute);
  variable_list arguments{input, value_or_undefined(norm_weight), value_or_undefined(norm_bias)};
  if (options.gated) arguments.push_back(*gate_weight);
  arguments.push_back(up_weight);
  if (options.gated) arguments.push_back(value_or_undefined(gate_bias));
  arguments.insert(arguments.end(),
                   {value_or_undefined(up_bias), down_weight, value_or_undefined(down_bias)});
  const MlpTensors tensors(arguments, options.gated);
  check(options, tensors, gate_bias);
  const Defined given = take_defined(arguments);
  if (given.needs_node) return Mlp::apply(options, at::TensorList(given.tensors), given.places);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Kept nothing;
  return run_forward(options, tensors, {}, &nothing);
}

}  // namespace

// A composition of dispatcher ops, as the linears behind an op (norm_linear.cpp).
TORCH_LIBRARY_IMPL(memopt, Autograd, m) {
  m.impl("mlp", mlp);
}
TORCH_LIBRARY_IMPL(memopt, CompositeExplicitAutograd, m) {
  m.impl("mlp", mlp);
}

}  // namespace memopt::autograd
