// The state of an op's random numbers while a graph is traced.
#pragma once

#include <ATen/ops/randint.h>

#include <limits>

#include "ownership.h"
#include "support.h"

namespace memopt::autograd {

// PyTorch's compiler merges equal calls of random ops that are not its own, although they are
// tagged as random (2.13: torch/_functorch/compile_utils.py, rand_ops), and then two drops of one
// tensor would be one. So a traced graph draws the state by an op of PyTorch's, which also makes it
// fit for CUDA graphs.
//
// On the CPU, what ops/random.cpp draws in eager mode.
inline Tensor traced_state(const Tensor& input) {
  return at::randint(std::numeric_limits<int64_t>::max(), {2}, input.options().dtype(at::kLong));
}

// The state argument of a _forward op: drawn here in a traced graph; else nothing, and the op draws
// it.
inline OptionalTensor state_to_apply(const Tensor& input) {
  return is_traced(input) ? OptionalTensor(traced_state(input)) : std::nullopt;
}

}  // namespace memopt::autograd
