// Activations by name.
#pragma once

#include <optional>
#include <string_view>

#include "../kernels/activation.h"

namespace memopt::ops {

// A name in kernels/activation.h, and the scalar of an activation that takes one.
kernels::ActivationSpec parse_activation(const char* op, std::string_view name,
                                         std::optional<double> scalar);

}  // namespace memopt::ops
