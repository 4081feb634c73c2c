// Activations by name.
#pragma once

#include <string_view>

#include "../kernels/activation.h"

namespace memopt::ops {

// "gelu", "gelu_tanh", "silu", "relu", "quick_gelu", "relu_squared" or "sigmoid".
kernels::Activation parse_activation(const char* op, std::string_view name);

inline kernels::Activation gelu_activation(kernels::GeluKind kind) {
  return kind == kernels::GeluKind::kErf ? kernels::Activation::kGelu
                                         : kernels::Activation::kGeluTanh;
}

}  // namespace memopt::ops
