// What the ops with an RMSNorm in them share below autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <limits>
#include <optional>

#include "norm.h"

namespace memopt::ops {

// PyTorch's rule for eps=None: the distance from 1 to the next number of the type that is computed
// in.
inline double eps_or_default(std::optional<double> eps, const at::Tensor& input) {
  if (eps.has_value()) return *eps;
  return input.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                            : std::numeric_limits<float>::epsilon();
}

inline NormKind rms_norm_kind(bool zero_centered_weight) {
  return zero_centered_weight ? NormKind::kRmsNormZeroCentered : NormKind::kRmsNorm;
}

}  // namespace memopt::ops
