// group_norm, instance_norm and batch_norm, with an activation behind them or without: one op.
// Formulas: kernels/channel_norm.h. (Batch norm across ranks: sync_batch_norm.h.)
//
// Saved: input, 2 bytes an element in bfloat16, and mean and rstd of each set, 8 bytes. The output
// is a function of these, weight and bias, element by element: its recipe is one kernel that reads
// input, and neither computes statistics nor moves a batch norm's running ones.
#pragma once

#include <string>

#include "activation.h"

namespace memopt::autograd {

// Itself where it has that type: below autograd no op may return its argument.
inline Tensor as_type(const Tensor& tensor, at::ScalarType type) {
  return tensor.scalar_type() == type ? tensor : tensor.to(type);
}

// A batch norm's arguments, which errors name.
void check_batch_norm(const char* op, const Tensor& input, const OptionalTensor& running_mean,
                      const OptionalTensor& running_var);

struct ChannelNormOp : OpDefaults {
  struct Options {
    std::string norm;  // "group_norm", "instance_norm", "batch_norm"
    int64_t groups = 1;
    double eps = 1e-5;
    bool given = false;                 // batch norm: by its running statistics
    bool running = false;               // it has them
    double momentum = 0.0;              // by which they move, where they are not what is given
    ActivationOptions activation = {};  // behind it; no name: none
  };
  template <class Options, class F>
  static void visit(Options& o, F&& f) {
    f(o.norm, o.groups, o.eps, o.given, o.running, o.momentum, o.activation.activation,
      o.activation.scalar);
  }

  // input, weight, bias, and with `running` the running mean and variance, of which one may be
  // missing unless they are given. The output reads the first three and the statistics.
  static constexpr size_t kReads = 3;
  static constexpr bool kRandom = true;

  // One activation at most, by the kernel that writes the output.
  static bool takes_behind(const Options& o) { return o.activation.activation.empty(); }
  static Options with_behind(Options o, const Behind& behind) {
    o.activation = {.activation = behind.activation, .scalar = behind.scalar};
    return o;
  }

  // With an activation behind: of the norm's output, from the activation's.
  static Tensor gradient_of_output(const Options& options, const variable_list& reads,
                                   const variable_list& extras, const Tensor& grad);

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
