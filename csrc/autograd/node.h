// The graph node of every op (op.h), with or without linears behind it (linears.h).
//
//   forward    x, others = op(inputs)      y_i = x W_i^T + b_i, and x is dropped; or x itself
//   backward   dx = sum of dy_i W_i        GEMMs; without linears the gradient that comes in
//              one kernel: gradients of the inputs from dx, and x written again if a W_i wants it
//              dW_i = dy_i^T x    db_i = sum over rows (dy_i)                        GEMMs
//
// x is written from values that the kernel reads anyway, in forward's bits, so gradients are those
// of the op and the linears one after another, in every bit. Saved: what the op says, and the
// weights, which are alive anyway. Nothing is saved or computed that no gradient asks for: without
// weight gradients x is not written, without input gradients there is no dx, and where a bias alone
// is trained nothing is saved. The gradient of the inputs is written over dx. An output requires a
// gradient if something that it is a function of does, as in PyTorch's own composition.
//
// Saving a norm's input in place of its output, and the order of the three steps: Dao's
// LayerNormLinear in flash-attention; Karpathy's llm.c drops activations the same way, with kernels
// of their own.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "arguments.h"
#include "linears.h"
#include "made_again.h"
#include "op.h"
#include "options.h"
#include "ownership.h"
#include "recipe.h"

namespace memopt::autograd {

template <class Op>
struct Node : torch::autograd::Function<Node<Op>> {
  static constexpr bool is_traceable = true;
  using Options = typename Op::Options;

  // The arguments are the op's inputs, the weights, the biases.
  static variable_list forward(AutogradContext* ctx, const Options& options, at::TensorList given,
                               Arguments& arguments) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const variable_list& in = arguments.inputs;
    const Linears& behind = arguments.behind;
    const bool for_inputs = any_requires_grad(in);
    Produced made = Op::forward(options, in, /*for_backward=*/true);
    save(ctx, options, arguments, made, for_inputs);
    if (behind.weights.empty()) remember<Op>(options, made, arguments.saved_without_hooks);
    variable_list outputs = apply(behind, made.output);
    variable_list constants;
    for (size_t i = 0; i < behind.weights.size(); ++i) {
      if (!for_inputs && !behind.requires_grad(i)) constants.push_back(outputs[i]);
    }
    if (!made.others.empty() && !any_requires_grad(at::TensorList(in).slice(0, Op::kOthersFrom))) {
      constants.insert(constants.end(), made.others.begin(), made.others.end());
    }
    if (!constants.empty()) ctx->mark_non_differentiable(constants);
    outputs.insert(outputs.end(), made.others.begin(), made.others.end());
    arguments.saved_outputs = std::move(made.others);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Options options = restore_options<Op>(ctx);
    const Places places = Places::restore(ctx, Op::inputs(options));
    const size_t linears = places.linears(), inputs = places.inputs();
    const variable_list saved = ctx->get_saved_variables();
    const auto end_of_reads = saved.begin() + Op::kReads;
    const auto end_of_extras = saved.end() - static_cast<std::ptrdiff_t>(linears);
    const variable_list reads(saved.begin(), end_of_reads), extras(end_of_reads, end_of_extras);

    Request request;
    bool any_input = false;
    for (size_t i = 0; i < inputs; ++i) {
      request.grads.push_back(places.needs_grad(ctx, i));
      any_input = any_input || request.grads.back();
    }
    bool any_grad = false;
    for (size_t i = 0; i < linears; ++i) {
      any_grad = any_grad || grads[i].defined();
      request.output = request.output || (grads[i].defined() && places.needs_grad(ctx, inputs + i));
    }

    variable_list result = places.no_gradients();
    if (linears == 0) {
      if (!any_defined(grads)) return result;
      set_inputs(&result, places, input_grads(options, reads, extras, grads, request).grads);
      return result;
    }
    if (!any_grad) return result;
    const NoAutocast no_autocast;
    Tensor x;
    if (any_input) {
      variable_list to_op;
      to_op.push_back(input_grad(grads, {end_of_extras, saved.end()}));
      request.may_overwrite_grads = true;
      Reproduced again = input_grads(options, reads, extras, to_op, request);
      to_op.clear();
      set_inputs(&result, places, std::move(again.grads));
      x = std::move(again.output);
    }
    if (request.output && !x.defined()) {
      const MakesOutputAgain makes_again;
      x = at::GradMode::is_enabled() ? Op::differentiable_forward(options, reads, extras)
                                     : Op::forward_again(options, reads, extras);
    }
    for (size_t i = 0; i < linears; ++i) {
      if (!grads[i].defined()) continue;
      const size_t weight = inputs + i, bias = weight + linears;
      if (places.needs_grad(ctx, weight)) places.set(&result, weight, weight_grad(grads[i], x));
      if (places.needs_grad(ctx, bias)) places.set(&result, bias, bias_grad(grads[i]));
    }
    return result;
  }

 private:
  static void save(AutogradContext* ctx, const Options& options, Arguments& arguments,
                   const Produced& made, bool for_inputs) {
    const size_t linears = arguments.behind.weights.size();
    const bool for_weights = any_requires_grad(arguments.behind.weights);
    variable_list saved;
    saved.reserve(made.reads.size() + made.extras.size() + linears);
    const auto add = [&](const variable_list& tensors, bool needed) {
      for (const Tensor& tensor : tensors) saved.push_back(needed ? tensor : Tensor());
    };
    add(made.reads, (Op::kSavesReads && for_inputs) || for_weights);
    if (linears == 0) Op::drop_unread(&saved);
    add(made.extras, for_inputs);
    add(arguments.behind.weights, for_inputs);
    if (linears == 0 && recipe_recorder() != nullptr && recipe_recorder()->needs_no_hooks(saved)) {
      arguments.saved_without_hooks = saved;
      arguments.without_hooks.begin();
    } else {
      arguments.without_hooks.begin_for_packer(*ctx, saved);
    }
    ctx->save_for_backward(std::move(saved));
    save_options<Op>(ctx, options);
    arguments.places.save(ctx);
    ctx->set_materialize_grads(false);
  }

  static Reproduced input_grads(const Options& options, const variable_list& reads,
                                const variable_list& extras, const variable_list& grads,
                                const Request& request) {
    if (!at::GradMode::is_enabled()) return Op::backward(options, reads, extras, grads, request);
    return {Op::differentiable_backward(options, reads, extras, grads, request.grads), Tensor()};
  }

  static void set_inputs(variable_list* result, const Places& places, variable_list grads) {
    for (size_t i = 0; i < grads.size(); ++i) places.set(result, i, std::move(grads[i]));
  }
};

}  // namespace memopt::autograd
