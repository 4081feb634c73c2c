// Declares an op: its schema, and the functions that are its kernels.
//
//   MEMOPT_DECLARE_PRIVATE(_gated_forward, {}, "_gated_forward(Tensor gate, ...) -> Tensor");
//
// Private ops are the forward and the backward that a public op is made of, below autograd. One
// function serves the CPU, CUDA and meta. (Public ops are declared by autograd/declare.h, beside
// their nodes.) They are not for users: their arguments may change. Those have the same names in
// all of them:
//
//   activation, activation_scalar   a name in kernels/activation.h, and its scalar if it takes one
//   norm                            "layer_norm" or "rms_norm", over the last normalized_dims
//                                   dimensions; an activation behind it is "gelu" or "gelu_tanh"
//   x                               a norm's input, or its sum with the residual
//   rng_state                       [seed, offset] of random numbers: drawn and returned, or given
//   recompute_output                a backward returns forward's output as well
//
// Results that were not asked for are undefined tensors (None in Python): of a backward, gradients
// that output_mask leaves out; of a forward, what only a backward reads, without for_backward.
//
// A name that ends in _: the result is written over the argument, for callers that own it.
// Backward's gradient is written over grad_output; another result may be the input itself.
#pragma once

#include <torch/library.h>

#include <string>
#include <vector>

namespace memopt::ops {

using Tags = std::vector<at::Tag>;

// No compiler may merge, repeat or drop the calls.
inline const Tags kDrawsRandomNumbers{at::Tag::nondeterministic_seeded};

// What the dispatcher registers for one op. The schema may be broken into lines.
struct Kernel {
  c10::DispatchKey key;
  torch::CppFunction function;
};
// Returns the op's name, "memopt::layer_norm"; it lasts for ever.
const char* declare(const char* schema, const Tags& tags, std::vector<Kernel> kernels);

// The names of all private ops that were declared.
const std::vector<std::string>& private_ops();

bool declare_private(const char* schema, const Tags& tags, torch::CppFunction function);

#define MEMOPT_DECLARE_PRIVATE(function, tags, schema) \
  static const bool is_declared##function =            \
      declare_private(schema, tags, torch::CppFunction(&function))

}  // namespace memopt::ops
