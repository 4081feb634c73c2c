// The norms over channels by PyTorch's differentiable ops: what create_graph=True composes.
#pragma once

#include <array>

#include "channel_norm.h"

namespace memopt::autograd {

// Gradients of input, weight and bias, in the dtypes of what they belong to; undefined where not
// wanted.
variable_list differentiable_channel_norm_backward(const ChannelNormOp::Options& options,
                                                   const variable_list& reads,
                                                   const variable_list& extras,
                                                   const Tensor& grad_output,
                                                   std::array<bool, 3> wanted);

Tensor differentiable_channel_norm(const ChannelNormOp::Options& options,
                                   const variable_list& reads, const variable_list& extras);

}  // namespace memopt::autograd
