// Activations by name.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "../kernels/activation.h"

namespace memopt::ops {

// A name in kernels/activation.h, and the scalar of an activation that takes one.
kernels::ActivationSpec parse_activation(const char* op, std::string_view name,
                                         std::optional<double> scalar);

// Uninitialised. PyTorch's backward of ReLU takes the memory order of its output, the others that
// of the gradient.
at::Tensor empty_activation_gradient(const kernels::ActivationSpec& activation,
                                     const at::Tensor& grad_output, const at::Tensor& input);

}  // namespace memopt::ops
