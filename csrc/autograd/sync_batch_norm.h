// Batch norm over the batches of all ranks of a group. Formulas: kernels/channel_norm.h; N is the
// number of values of a channel on all ranks, of which each may have another one, or none.
//
//   forward    moments of this rank -> gathered -> those of all (Chan, Golub & LeVeque, 1983) -> y
//   backward   sums of this rank -> added up over the ranks -> divided by N -> dx
//
// The gradients of weight and bias are this rank's, as PyTorch's SyncBatchNorm has them: data
// parallelism adds them up. What is exchanged is float64, 16 bytes a channel each way: a mean takes
// its shift (PartMoments) with it, and counts are exact. Each rank computes the statistics from the
// same numbers in the same order, so that all have the same bits.
//
// Saved: input, mean and rstd, as batch norm does, and N. The recipe of the output exchanges
// nothing.
#pragma once

#include <string>

#include "channel_norm.h"

namespace memopt::autograd {

struct SyncBatchNormOp : ChannelNormOp {
  struct Options : ChannelNormOp::Options {
    int64_t ranks = 2;
    std::string group;  // the name of the ranks' group, as functional collectives take it
  };
  template <class Options, class F>
  static void visit(Options& o, F&& f) {
    f(o.norm, o.groups, o.eps, o.given, o.running, o.momentum, o.ranks, o.group);
  }

  static Produced forward(const Options& options, const variable_list& in, bool for_backward);
  static Reproduced backward(const Options& options, const variable_list& reads,
                             const variable_list& extras, const variable_list& grads,
                             const Request& request);
  [[noreturn]] static variable_list differentiable_backward(const Options& options,
                                                            const variable_list& reads,
                                                            const variable_list& extras,
                                                            const variable_list& grads,
                                                            const Wanted& wanted);
};

}  // namespace memopt::autograd
