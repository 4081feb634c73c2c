// Activations, alone, with dropout behind, or with a linear behind. Formulas: kernels/activation.h.
//
//   output = f(input) m      grad_input = grad_output m f'(input)      m: dropout's mask, or 1
//
// Saved: input, 2 bytes an element in bfloat16, and with dropout 16 bytes a call. Neither f(input)
// nor a mask. Eager PyTorch saves what dropout reads as well. (The consumer of the output, a linear
// say, saves that itself, unless it stands behind in the same op.)
#pragma once

#include <string>
#include <string_view>

#include "op.h"
#include "recipe.h"

namespace memopt::autograd {

struct ActivationOptions {
  std::string activation;        // a name in kernels/activation.h
  std::optional<double> scalar;  // for an activation that takes one
  bool drops = false;
  double p = 0.0;
};

struct ActivationOp : OpDefaults {
  using Options = ActivationOptions;
  template <class Options, class F>
  static void visit(Options& o, F&& f) {
    f(o.activation, o.scalar, o.drops, o.p);
  }

  static constexpr size_t kReads = 1;
  static constexpr bool kRandom = true;
  static c10::SymInt features(const Options&, const variable_list& in) {
    return in[0].sym_size(-1);
  }

  // As the recipe of what it reads may have it.
  static std::optional<Behind> behind(const Options& o) {
    if (o.drops) return std::nullopt;
    return Behind{o.activation, o.scalar};
  }

  // in_place: the output may be written over an input that is the caller's own (ownership.h).
  static Produced forward(const Options& options, const variable_list& in, bool for_backward,
                          bool in_place = false);
  static Tensor forward_again(const Options& options, const variable_list& reads,
                              const variable_list& extras);
  static Reproduced backward(const Options& options, const variable_list& reads,
                             const variable_list& extras, const variable_list& grads,
                             const Request& request);
  static variable_list differentiable_backward(const Options& options, const variable_list& reads,
                                               const variable_list& extras,
                                               const variable_list& grads, const Wanted& wanted);
  static Tensor differentiable_forward(const Options& options, const variable_list& reads,
                                       const variable_list& extras);
};

// A 16-bit tensor as float32, where the kernels compute; differentiable.
Tensor widened(const Tensor& tensor);

// f(x) by PyTorch's differentiable ops, and grad f'(x): what create_graph=True composes.
Tensor activation_value(const ActivationOptions& f, const Tensor& x);
Tensor activation_gradient(const ActivationOptions& f, const Tensor& grad, const Tensor& x);

}  // namespace memopt::autograd
