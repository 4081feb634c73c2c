// What an op declares, once. Its node (node.h), its recipe (recipe.h), the linears behind it
// (linears.h), mlp and the dispatcher's registrations (declare.h) follow from that.
//
// An op is a struct of static members. Backward can write its output again, beside the gradients of
// its inputs, so that what reads the output need not save it:
//
//   Options              plain fields; visit(options, f) calls f(field...) with what backward needs
//   kReads               how many tensors `output` is a function of
//   OpDefaults           its base: constants, to be hidden where the op differs
//
//   Produced forward(options, in, for_backward)
//   Tensor forward_again(options, reads, extras)             the same bits as forward's output
//   Reproduced backward(options, reads, extras, grads, request)
//   variable_list differentiable_backward(options, reads, extras, grads, wanted)
//   Tensor differentiable_forward(options, reads, extras)
//
// All of these call dispatcher ops; forward and backward run below autograd, the differentiable
// ones are for create_graph=True. An op that can have linears behind it also has
// features(options, in), the last dimension of its output.
#pragma once

#include "support.h"

namespace memopt::autograd {

struct OpDefaults {
  // Whether output is a function of the extras as well: of a random state, or of statistics.
  static constexpr bool kRandom = false;
  // Whether backward reads what output is a function of.
  static constexpr bool kSavesReads = true;
  // The other outputs are functions of this many of the first inputs.
  static constexpr size_t kOthersFrom = 0;
  // Drops from the reads what no gradient of an input asks for.
  static void drop_unread(variable_list* /*reads*/) {}
};

struct Produced {
  Tensor output;
  variable_list reads;   // what output is a function of: the inputs, or a sum of two of them
  variable_list extras;  // what backward needs besides: statistics, a random state
  variable_list others;  // further outputs: the sum
};

struct Request {
  Wanted grads;                      // of the inputs
  bool output = false;               // the output again
  bool may_overwrite_grads = false;  // the first incoming gradient may be ours (ownership.h)
  bool may_overwrite_reads = false;  // and so may what forward read
};

struct Reproduced {
  variable_list grads;  // of the inputs, undefined where not asked for
  Tensor output;
};

inline bool any_defined(const variable_list& tensors) {
  for (const Tensor& tensor : tensors) {
    if (tensor.defined()) return true;
  }
  return false;
}

}  // namespace memopt::autograd
