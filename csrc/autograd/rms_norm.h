// What the graph nodes of rms_norm and add_rms_norm share.
#pragma once

#include <array>
#include <vector>

#include "support.h"

namespace memopt::autograd {

struct RmsNormSaved {
  Tensor input;   // add_rms_norm's sum
  Tensor weight;  // may be undefined
  Tensor rstd;
  std::vector<c10::SymInt> normalized_shape;
  std::optional<double> eps;
  bool zero_centered_weight;
  std::array<bool, 2> wanted;  // input, weight: is a gradient asked for
};

// rms_norm's gradients by PyTorch's differentiable ops, in the dtypes of what they belong to: the
// path of create_graph=True. rstd is computed again, since it moves with input.
std::array<Tensor, 2> differentiable_backward(const RmsNormSaved& saved, const Tensor& grad_output);
// Likewise the output.
Tensor differentiable_forward(const RmsNormSaved& saved);

// To memopt.recompute(): rms_norm of `input` is `output` (recipe.h).
void remember_rms_norm(const Tensor& output, const Tensor& input,
                       c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                       std::optional<double> eps, bool zero_centered_weight);

void save_options(torch::autograd::AutogradContext* ctx, c10::SymIntArrayRef normalized_shape,
                  std::optional<double> eps, bool zero_centered_weight);
void restore_options(torch::autograd::AutogradContext* ctx, RmsNormSaved* saved);

}  // namespace memopt::autograd
