// Activations and their derivatives by PyTorch's differentiable ops: what create_graph=True
// composes.
#pragma once

#include <string_view>

#include "support.h"

namespace memopt::autograd {

// A 16-bit tensor as float32, where the kernels compute; differentiable.
Tensor widened(const Tensor& tensor);

// f(x), for an activation's name as in ops/activation.h.
Tensor activation_value(std::string_view name, const Tensor& x);

// grad f'(x)
Tensor activation_gradient(std::string_view name, const Tensor& grad, const Tensor& x);

}  // namespace memopt::autograd
