// The private ops have no derivative: they are called below autograd, by the nodes of the public
// ones. Above autograd, an op that returns tensors can be called, and their backward raises an
// error (PyTorch's fallback). An op that writes over its argument raises one at once, since the
// argument keeps the graph of the values that it had.
#pragma once

namespace memopt::autograd {

// Of all private ops that have no Autograd kernel of their own. To be called once, when all ops are
// declared.
void register_no_derivatives();

}  // namespace memopt::autograd
