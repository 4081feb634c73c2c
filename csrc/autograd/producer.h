// A producer: an op whose output backward can write again, beside the gradients of its inputs, so
// that whoever reads the output need not save it. Norms, activations, gated units.
//
// It has, all static:
//   kName                                    the op with linears behind it, for errors
//   c10::SymInt features(inputs)             of its output: the last dimension
//   Options, save(ctx, options), restore(ctx)
//   Produced forward(options, inputs)        below autograd; by dispatcher ops
//   Reproduced backward(options, inputs, extras, grad, request)
//   variable_list differentiable_backward(options, inputs, extras, grad, wanted)
//   Tensor differentiable_forward(options, inputs, extras)
// The differentiable ones are for create_graph=True. An activation may be told in forward that its
// inputs are the caller's own, to be written over.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>

#include <vector>

#include "support.h"

namespace memopt::autograd {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Produced {
  Tensor output;
  variable_list extras;  // what backward needs beside the inputs: statistics, a random state
};

// What backward is asked for. The incoming gradient is the caller's own, to be written over.
struct Request {
  std::vector<bool> grads;            // of the inputs
  bool output;                        // the output again
  bool may_overwrite_inputs = false;  // the inputs are the caller's own as well
};

struct Reproduced {
  variable_list grads;  // of the inputs, undefined where not asked for
  Tensor output;
};

}  // namespace memopt::autograd
