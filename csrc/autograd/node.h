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

#include <utility>

#include "graph_node.h"
#include "linears.h"
#include "made_again.h"
#include "op.h"

namespace memopt::autograd {

// The derivative of an op with or without linears behind it. The arguments are the op's inputs, the
// weights, the biases.
template <class Op>
struct OpDerivative {
  typename Op::Options options;
  size_t linears = 0;

  template <class Derivative, class F>
  static void visit(Derivative& derivative, F&& f) {
    Op::visit(derivative.options, std::forward<F>(f));
  }

  // As GraphNode asks for it.
  std::optional<Behind> behind() const {
    if constexpr (requires { Op::behind(options); }) {
      if (linears == 0) return Op::behind(options);
    }
    return std::nullopt;
  }

  variable_list backward(variable_list saved, const variable_list& grads,
                         const Wanted& wanted) const {
    variable_list result(wanted.size());
    const size_t inputs = wanted.size() - 2 * linears;
    const variable_list reads = taken(&saved, 0, Op::kReads);
    const variable_list extras = taken(&saved, Op::kReads, saved.size() - linears);
    const variable_list weights = taken(&saved, saved.size() - linears, saved.size());

    Request request;
    bool any_input = false;
    for (size_t i = 0; i < inputs; ++i) {
      request.grads.push_back(wanted[i]);
      any_input = any_input || wanted[i];
    }
    bool any_grad = false;
    for (size_t i = 0; i < linears; ++i) {
      any_grad = any_grad || grads[i].defined();
      request.output = request.output || (grads[i].defined() && wanted[inputs + i]);
    }

    if (linears == 0) {
      if (any_defined(grads)) set(&result, input_grads(reads, extras, grads, request).grads);
      return result;
    }
    if (!any_grad) return result;
    const NoAutocast no_autocast;
    Tensor x;
    if (any_input) {
      variable_list to_op;
      to_op.push_back(input_grad(grads, weights));
      request.may_overwrite_grads = true;
      Reproduced again = input_grads(reads, extras, to_op, request);
      to_op.clear();
      set(&result, std::move(again.grads));
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
      if (wanted[weight]) result[weight] = weight_grad(grads[i], x);
      if (wanted[bias]) result[bias] = bias_grad(grads[i]);
    }
    return result;
  }

 private:
  Reproduced input_grads(const variable_list& reads, const variable_list& extras,
                         const variable_list& grads, const Request& request) const {
    if (!at::GradMode::is_enabled()) return Op::backward(options, reads, extras, grads, request);
    return {Op::differentiable_backward(options, reads, extras, grads, request.grads), Tensor()};
  }

  static variable_list taken(variable_list* from, size_t begin, size_t end) {
    return {std::make_move_iterator(from->begin() + static_cast<std::ptrdiff_t>(begin)),
            std::make_move_iterator(from->begin() + static_cast<std::ptrdiff_t>(end))};
  }

  // Those of the inputs.
  static void set(variable_list* result, variable_list grads) {
    std::move(grads.begin(), grads.end(), result->begin());
  }
};

// What a node saves: the op's reads, its extras, the weights, each only if a gradient asks for it.
template <class Op>
variable_list saved_of(const Produced& made, const variable_list& inputs, const Linears& behind) {
  const bool for_inputs = any_requires_grad(inputs);
  const bool for_weights = any_requires_grad(behind.weights);
  variable_list saved;
  saved.reserve(made.reads.size() + made.extras.size() + behind.weights.size());
  const auto add = [&](const variable_list& tensors, bool needed) {
    for (const Tensor& tensor : tensors) saved.push_back(needed ? tensor : Tensor());
  };
  add(made.reads, (Op::kSavesReads && for_inputs) || for_weights);
  if (behind.weights.empty()) Op::drop_unread(&saved);
  add(made.extras, for_inputs);
  add(behind.weights, for_inputs);
  return saved;
}

}  // namespace memopt::autograd
