// Gated units, of two tensors or of one that holds both, alone or with a linear behind. Formulas:
// kernels/gated.h.
//
//   output = f(gate) up      grad_gate = grad_output up f'(gate)      grad_up = grad_output f(gate)
//
// Saved: gate and up, 4 bytes an element of the output in bfloat16; up only if gate requires a
// gradient or a linear stands behind. Eager PyTorch saves f(gate) as well, 6 bytes, and in front of
// a linear the output, 8.
#pragma once

#include "activation.h"
#include "op.h"

namespace memopt::autograd {

struct GatedOp : OpDefaults {
  // Only mlp has a dropout behind it, which is a step of its own.
  using Options = ActivationOptions;
  template <class Options, class F>
  static void visit(Options& o, F&& f) {
    ActivationOp::visit(o, f);
  }

  static constexpr size_t kReads = 2;
  static constexpr bool kRandom = true;
  static c10::SymInt features(const Options&, const variable_list& in) {
    return in[0].sym_size(-1);
  }
  static void drop_unread(variable_list* reads);

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

struct GatedPackedOp : OpDefaults {
  struct Options {
    ActivationOptions f;
    bool interleaved = false;
  };
  template <class Options, class F>
  static void visit(Options& o, F&& f) {
    f(o.f.activation, o.f.scalar, o.interleaved);
  }

  static constexpr size_t kReads = 1;
  static c10::SymInt features(const Options&, const variable_list& in) {
    return in[0].sym_size(-1) / 2;
  }

  static Produced forward(const Options& options, const variable_list& in, bool for_backward);
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

}  // namespace memopt::autograd
