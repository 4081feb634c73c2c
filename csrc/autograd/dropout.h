// Dropout as a step of a larger op.
#pragma once

#include <tuple>

#include "support.h"

namespace memopt::autograd {

// Output and state, to be called below autograd. The state of its random numbers is drawn here.
std::tuple<Tensor, Tensor> dropout_forward(const Tensor& input, double p);

// The same mask again, on a gradient or on what was dropped; differentiable. An undefined tensor
// stays one.
Tensor drop_again(const Tensor& tensor, const Tensor& state, double p);

}  // namespace memopt::autograd
