// What the ops with a residual in front of a norm share below autograd.
#pragma once

#include "norm.h"

namespace memopt::ops {

// Backward of add_layer_norm or add_rms_norm, by a.kind; a.input is the sum.
NormGradients add_norm_backward(const NormArguments& a, const NormSaved& saved,
                                std::array<bool, 3> output_mask, bool recompute_output);

}  // namespace memopt::ops
