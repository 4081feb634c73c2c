// What layer_norm and the ops with an activation behind it share below autograd: checks,
// allocation, Params.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <array>
#include <optional>
#include <tuple>

#include "../kernels/layer_norm.h"

namespace memopt::ops {

using OptionalTensor = std::optional<at::Tensor>;

struct LayerNormArguments {
  const char* op;
  const at::Tensor& input;
  c10::SymIntArrayRef normalized_shape;
  const OptionalTensor& weight;
  const OptionalTensor& bias;
};

// (output, mean, rstd); the last two undefined without `statistics`. run(params) queues the kernel;
// it is not called for meta tensors.
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_forward(
    const LayerNormArguments& arguments, double eps, bool statistics,
    c10::function_ref<void(const kernels::LayerNormForwardParams&)> run);

struct LayerNormSaved {
  const at::Tensor& grad_output;
  const at::Tensor& mean;
  const at::Tensor& rstd;
};

// (grad_input, grad_weight, grad_bias, output), undefined where output_mask or recompute_output is
// false.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(
    const LayerNormArguments& arguments, const LayerNormSaved& saved,
    std::array<bool, 3> output_mask, bool recompute_output,
    c10::function_ref<void(const kernels::LayerNormBackwardParams&)> run);

// Elements of the rows of one part: what a CPU thread is worth waking for.
int64_t elements_per_part(const kernels::LayerNormBackwardParams& p);

}  // namespace memopt::ops
