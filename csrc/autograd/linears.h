// Linears behind an op whose output backward can write again: their checks, forward and gradients.
// The node that puts them together: node.h.
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "support.h"

namespace memopt::autograd {

// Each weight is [out_i, features]; each bias undefined or [out_i].
struct Linears {
  variable_list weights;
  variable_list biases;

  bool requires_grad(size_t i) const {
    return weights[i].requires_grad() || (biases[i].defined() && biases[i].requires_grad());
  }
};

// A tensor with features, the last dimension, of a dtype that memopt takes.
void check_features(const char* op, const char* name, const Tensor& tensor);

// All leading dimensions as rows. (Not flatten, which vmap cannot batch below autograd.)
Tensor as_matrix(const Tensor& tensor);

// At least one weight, all of input's dtype and device, and with `features` columns.
void check_linears(const char* op, const Tensor& input, const c10::SymInt& features,
                   const Linears& linears);

void check_linear(const char* op, const char* weight_name, const char* bias_name,
                  const Tensor& input, const c10::SymInt& features, const Tensor& weight,
                  const Tensor& bias);

// The linears' outputs; x itself where there is none.
variable_list apply(const Linears& linears, const Tensor& x);

// The sum of `start`, where there is one, and of dy_i W_i, in the order in which autograd would add
// them: the last linear's first. Undefined gradients count as zero; one must be defined. The result
// is the caller's own.
Tensor input_grad(at::TensorList grads, const variable_list& weights, const Tensor& start = {});

Tensor weight_grad(const Tensor& grad, const Tensor& x);
Tensor bias_grad(const Tensor& grad);

// Around a backward with products of its own: they run in forward's dtypes also where backward is
// called under autocast.
struct NoAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

}  // namespace memopt::autograd
