// An activation and dropout behind it, element by element, in one kernel each way:
//
//   y = f(x) m          dx = dy m f'(x)          f: activation.h          m: dropout.h
//
// f(x) is not rounded before it is multiplied by m, and neither is dy m before f': one rounding to
// the tensors' type where the two ops have two. i, of which m_i is a function, is the element's
// index in the contiguous tensor. What is dropped is multiplied by 0: infinities and NaN become
// NaN.
//
// Saved for backward: x, 2 bytes an element in bfloat16, and seed and offset, 16 bytes a call. The
// two ops of PyTorch save x, f(x) behind it and a mask. Recomputed: m, and y where the caller asks
// for it, in forward's bits.
#pragma once

#include "activation.h"
#include "dropout.h"

namespace memopt::kernels {

// The arrays are contiguous; y and dx may be written as ActivationForwardParams and
// ActivationBackwardParams say.
struct ActivationDropoutForwardParams {
  ActivationForwardParams activation;
  DropoutRule rule;
  int64_t* state;  // as DropoutParams has it
};

struct ActivationDropoutBackwardParams {
  ActivationBackwardParams activation;
  DropoutRule rule;
};

}  // namespace memopt::kernels
