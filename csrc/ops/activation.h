// Activations by name.
#pragma once

#include <string_view>

#include "../kernels/activation.h"

namespace memopt::ops {

// One of the names in kernels/activation.h.
kernels::Activation parse_activation(const char* op, std::string_view name);

}  // namespace memopt::ops
