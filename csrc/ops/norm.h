// What the norms share below autograd: checks, allocation, Params.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <array>
#include <optional>
#include <tuple>

#include "../kernels/norm.h"

namespace memopt::ops {

using OptionalTensor = std::optional<at::Tensor>;

enum class NormKind {
  kLayerNorm,
  kRmsNorm,              // no mean, no bias
  kRmsNormZeroCentered,  // its scale is 1 + weight
};

struct NormArguments {
  const char* op;
  const at::Tensor& input;  // in backward of the add_ ops, the sum
  c10::SymIntArrayRef normalized_shape;
  const OptionalTensor& weight;
  const OptionalTensor& bias;
  NormKind kind = NormKind::kLayerNorm;
};

// Undefined where there is no such result: the statistics without `statistics`, the mean for
// RMSNorm, the sum without a residual.
struct NormOutputs {
  at::Tensor output;
  at::Tensor sum;
  at::Tensor mean;
  at::Tensor rstd;
};

// run(params) queues the kernel; it is not called for meta tensors.
NormOutputs norm_forward(const NormArguments& arguments, double eps, bool statistics,
                         const at::Tensor* residual,
                         c10::function_ref<void(const kernels::NormForwardParams&)> run);

struct NormSaved {
  const at::Tensor& grad_output;
  const at::Tensor& mean;  // undefined for RMSNorm
  const at::Tensor& rstd;
  const OptionalTensor& grad_sum;  // the sum's own gradient, in the add_ ops
  bool in_place = false;           // the input's gradient is written over grad_output
};

// Undefined where output_mask or recompute_output is false.
struct NormGradients {
  at::Tensor input;
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor output;  // re-emitted
};

// `also`: whether run() is wanted even where all of these are not, for results of its own.
NormGradients norm_backward(const NormArguments& arguments, const NormSaved& saved,
                            std::array<bool, 3> output_mask, bool recompute_output,
                            c10::function_ref<void(const kernels::NormBackwardParams&)> run,
                            bool also = false);

// Elements of the rows of one part: what a CPU thread is worth waking for.
int64_t elements_per_part(const kernels::NormBackwardParams& p);

// LayerNorm's arguments and results.
using LayerNormArguments = NormArguments;

struct LayerNormSaved {
  const at::Tensor& grad_output;
  const at::Tensor& mean;
  const at::Tensor& rstd;
  bool in_place = false;
};

// (output, mean, rstd); the last two undefined without `statistics`.
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_forward(
    const LayerNormArguments& arguments, double eps, bool statistics,
    c10::function_ref<void(const kernels::NormForwardParams&)> run);

// (grad_input, grad_weight, grad_bias, output)
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(
    const LayerNormArguments& arguments, const LayerNormSaved& saved,
    std::array<bool, 3> output_mask, bool recompute_output,
    c10::function_ref<void(const kernels::NormBackwardParams&)> run);

}  // namespace memopt::ops
