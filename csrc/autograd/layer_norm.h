// What the graph nodes of layer_norm and of the ops with an activation behind it keep, and how it
// comes back.
#pragma once

#include <array>

#include "support.h"

namespace memopt::autograd {

struct LayerNormSaved {
  Tensor input;
  Tensor weight;  // may be undefined
  Tensor bias;    // may be undefined; a parameter, alive anyway
  Tensor mean;
  Tensor rstd;
  std::vector<c10::SymInt> normalized_shape;
  std::array<bool, 3> wanted;  // input, weight, bias: is a gradient asked for
};

void save(torch::autograd::AutogradContext* ctx, const Tensor& input,
          c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
          const OptionalTensor& bias, const Tensor& mean, const Tensor& rstd);

// To memopt.recompute(): layer_norm of `input` is `output` (recipe.h).
void remember_layer_norm(const Tensor& output, const Tensor& input,
                         c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                         const OptionalTensor& bias, double eps);

LayerNormSaved restore(torch::autograd::AutogradContext* ctx);

// The arguments of PyTorch's differentiable backward, in one dtype (float32, or float64 for
// float64): the path of create_graph=True. `.to` is differentiable, so gradients arrive in each
// argument's own dtype.
struct Widened {
  Tensor input;
  OptionalTensor weight;
  OptionalTensor bias;
};
Widened widen(const LayerNormSaved& saved);
Tensor widen(const Tensor& tensor);

// layer_norm's gradients by torch.native_layer_norm_backward, in the dtypes of what they belong to.
std::array<Tensor, 3> differentiable_backward(const LayerNormSaved& saved, const Widened& wide,
                                              const Tensor& grad_output);

}  // namespace memopt::autograd
