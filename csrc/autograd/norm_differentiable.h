// The norms by PyTorch's differentiable ops: what create_graph=True composes.
#pragma once

#include <array>

#include "norm.h"

namespace memopt::autograd {

// Gradients of v, weight and bias, in the dtypes of what they belong to; undefined where not
// wanted.
variable_list differentiable_norm_backward(const NormOp::Options& options,
                                           const variable_list& reads, const variable_list& extras,
                                           const Tensor& grad_output, std::array<bool, 3> wanted);

Tensor differentiable_norm(const NormOp::Options& options, const variable_list& reads);

}  // namespace memopt::autograd
