// Dropout as a step of a larger op.
#pragma once

#include <tuple>

#include "support.h"

namespace memopt::autograd {

// Output and state, to be called below autograd. The state of its random numbers is drawn here;
// with it memopt::_dropout_backward applies the same mask again, differentiably.
std::tuple<Tensor, Tensor> dropout_forward(const Tensor& input, double p);

}  // namespace memopt::autograd
