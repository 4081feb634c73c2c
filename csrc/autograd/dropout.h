// dropout: saves the state of its random numbers; draws the mask again from it.
//
//   output = input m       grad_input = grad_output m
//   m_i = 0 or 1 / (1 - p), a function of the state and of i (kernels/dropout.h)
//
// Saved: seed and offset, 16 bytes a call, as a tensor of input's device: a compiled graph carries
// them from forward to backward, and the host does not wait for them. (The CUDA allocator rounds
// them up to 512 bytes.) Eager PyTorch saves a mask.
#pragma once

#include "op.h"

namespace memopt::autograd {

struct DropoutOp : OpDefaults {
  struct Options {
    double p = 0.5;
  };
  template <class Options, class F>
  static void visit(Options& o, F&& f) {
    f(o.p);
  }

  static constexpr size_t kReads = 1;
  static constexpr bool kRandom = true;
  static constexpr bool kSavesReads = false;

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

// The same mask again, on a gradient or on what was dropped; differentiable, by any order: the
// backward op is linear in its gradient and its own derivative. An undefined tensor stays one.
Tensor drop_again(const Tensor& tensor, const Tensor& state, double p);

}  // namespace memopt::autograd
