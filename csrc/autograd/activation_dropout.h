// activation_dropout as a step of a larger op, to be called below autograd.
#pragma once

#include <string_view>
#include <tuple>

#include "support.h"

namespace memopt::autograd {

// The output, and the state of its random numbers, drawn here.
std::tuple<Tensor, Tensor> activation_dropout_forward(const Tensor& input, double p,
                                                      std::string_view activation);

// The output again.
Tensor activation_dropout_again(const Tensor& input, const Tensor& state, double p,
                                std::string_view activation);

// The gradient of the input, and the output again if asked for.
std::tuple<Tensor, Tensor> activation_dropout_backward(const Tensor& grad, const Tensor& input,
                                                       const Tensor& state, double p,
                                                       std::string_view activation,
                                                       bool output_again);

}  // namespace memopt::autograd
