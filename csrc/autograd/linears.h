// Linears behind an op whose output backward can write again (producer.h: a norm, an activation, a
// gated unit). The output is never saved.
//
//   forward    x = producer(inputs)                  y_i = x W_i^T + b_i             x is dropped
//   backward   dx = sum of dy_i W_i                                                  GEMMs
//              one kernel: gradients of the inputs from dx, and x written again
//              dW_i = dy_i^T x    db_i = sum over rows (dy_i)                        GEMMs
//
// x is written from values that the kernel reads anyway, in forward's bits, so gradients are those
// of the producer and the linears one after another, in every bit. Saved: what the producer saves,
// and the weights, which are alive anyway. Nothing is saved or computed that no gradient asks for:
// without weight gradients x is not written, without input gradients there is no dx, and where a
// bias alone is trained nothing is saved. The gradient of the inputs is written over dx.
//
// Saving a norm's input in place of its output, and the order of the three steps: Dao's
// LayerNormLinear in flash-attention; Karpathy's llm.c drops activations the same way, with kernels
// of their own.
#pragma once

#include <ATen/ops/linear.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <string>
#include <vector>

#include "defined.h"
#include "producer.h"

namespace memopt::autograd {

// Each weight is [out_i, features]; each bias undefined or [out_i].
struct Linears {
  std::vector<Tensor> weights;
  std::vector<Tensor> biases;
};

// At least one weight, all of input's dtype and device, and with `features` columns.
void check_linears(const char* op, const Tensor& input, const c10::SymInt& features,
                   const Linears& linears);

void check_linear(const char* op, const char* weight_name, const char* bias_name,
                  const Tensor& input, const c10::SymInt& features, const Tensor& weight,
                  const Tensor& bias);

variable_list apply(const Linears& linears, const Tensor& x);

// Not ctx->needs_input_grad(), which is wrong in Function::forward inside a recomputation.
bool any_requires_grad(const variable_list& tensors);

// The sum of `start`, where there is one, and of dy_i W_i, in the order in which autograd would add
// them: the last linear's first. Undefined gradients count as zero; one must be defined.
Tensor input_grad(const variable_list& grads, const std::vector<Tensor>& weights,
                  const Tensor& start = {});

Tensor weight_grad(const Tensor& grad, const Tensor& x);
Tensor bias_grad(const Tensor& grad);

// Around a backward with products of its own: they run in forward's dtypes also where backward is
// called under autocast.
struct NoAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

template <class Producer>
struct ThroughLinears : torch::autograd::Function<ThroughLinears<Producer>> {
  static constexpr bool is_traceable = true;
  using Options = typename Producer::Options;

  // The arguments (defined.h) are the producer's inputs, the weights, the biases.
  static variable_list forward(AutogradContext* ctx, const Options& options, at::TensorList given,
                               const std::vector<int64_t>& places, int64_t linears) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto inputs = static_cast<int64_t>(places.size()) - 2 * linears;
    const variable_list all = put_back(given, places);
    const variable_list in(all.begin(), all.begin() + inputs);
    const auto weights = all.begin() + inputs;
    const Linears behind{{weights, weights + linears}, {weights + linears, all.end()}};
    const Produced produced = Producer::forward(options, in);
    const bool for_inputs = any_requires_grad(in);
    const bool for_weights = for_inputs || any_requires_grad(behind.weights);
    variable_list saved;
    const auto save = [&](const variable_list& tensors, bool needed) {
      for (const Tensor& tensor : tensors) saved.push_back(needed ? tensor : Tensor());
    };
    save(in, for_weights);
    save(produced.extras, for_inputs);
    save(behind.weights, for_inputs);
    ctx->save_for_backward(saved);
    Producer::save(ctx, options);
    ctx->saved_data["places"] = places;
    ctx->saved_data["linears"] = linears;
    ctx->set_materialize_grads(false);
    return apply(behind, produced.output);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const NoAutocast no_autocast;
    const std::vector<int64_t> places = ctx->saved_data["places"].toIntVector();
    const int64_t linears = ctx->saved_data["linears"].toInt();
    const auto inputs = static_cast<int64_t>(places.size()) - 2 * linears;
    const auto needs_grad = [&](int64_t i) {
      return places[i] >= 0 && ctx->needs_input_grad(places[i]);
    };
    const Options options = Producer::restore(ctx);
    const variable_list saved = ctx->get_saved_variables();
    const variable_list in(saved.begin(), saved.begin() + inputs);
    const variable_list extras(saved.begin() + inputs, saved.end() - linears);
    const variable_list weights(saved.end() - linears, saved.end());

    std::vector<bool> wanted(inputs);
    bool any_input = false;
    for (int64_t i = 0; i < inputs; ++i) {
      wanted[i] = needs_grad(i);
      any_input = any_input || wanted[i];
    }
    bool any_grad = false;
    bool any_weight = false;
    for (int64_t i = 0; i < linears; ++i) {
      any_grad = any_grad || grads[i].defined();
      any_weight = any_weight || (grads[i].defined() && needs_grad(inputs + i));
    }

    // One for each argument of forward and each of `given`.
    const auto given = std::count_if(places.begin(), places.end(), [](auto p) { return p >= 0; });
    variable_list result(1 + given + 2);
    const auto set = [&](int64_t i, const Tensor& grad) {
      if (places[i] >= 0) result[1 + places[i]] = grad;
    };
    if (!any_grad) return result;
    Tensor x;
    if (any_input) {
      const Tensor dx = input_grad(grads, weights);
      if (at::GradMode::is_enabled()) {
        const auto d = Producer::differentiable_backward(options, in, extras, dx, wanted);
        for (int64_t i = 0; i < inputs; ++i) set(i, d[i]);
      } else {
        Reproduced again = Producer::backward(options, in, extras, dx, {wanted, any_weight});
        for (int64_t i = 0; i < inputs; ++i) set(i, again.grads[i]);
        x = std::move(again.output);
      }
    }
    if (any_weight && !x.defined()) {
      x = at::GradMode::is_enabled() ? Producer::differentiable_forward(options, in, extras)
                                     : Producer::forward(options, in).output;
    }
    for (int64_t i = 0; i < linears; ++i) {
      if (!grads[i].defined()) continue;
      if (needs_grad(inputs + i)) set(inputs + i, weight_grad(grads[i], x));
      if (needs_grad(inputs + linears + i)) set(inputs + linears + i, bias_grad(grads[i]));
    }
    return result;
  }
};

// The public op's autograd kernel: through a node if one is needed.
template <class Producer>
variable_list through_linears(const typename Producer::Options& options, const variable_list& in,
                              const Linears& linears) {
  TORCH_CHECK(in[0].dim() >= 1, Producer::kName,
              ": input must have at least one dimension, got a scalar");
  check_linears(Producer::kName, in[0], Producer::features(in), linears);
  variable_list tensors = in;
  tensors.insert(tensors.end(), linears.weights.begin(), linears.weights.end());
  tensors.insert(tensors.end(), linears.biases.begin(), linears.biases.end());
  const Defined given = take_defined(tensors);
  if (given.needs_node) {
    return ThroughLinears<Producer>::apply(options, at::TensorList(given.tensors), given.places,
                                           static_cast<int64_t>(linears.weights.size()));
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return apply(linears, Producer::forward(options, in).output);
}

}  // namespace memopt::autograd
