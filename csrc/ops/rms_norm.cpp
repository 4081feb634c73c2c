// RMSNorm below autograd.
#include "rms_norm.h"

#include <torch/library.h>

#include "launch.h"

namespace memopt::ops {
namespace {

using at::Tensor;
using kernels::NormBackwardParams;
using kernels::NormForwardParams;
using kernels::cpu::Kernels;

NormOutputs forward(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                    const OptionalTensor& weight, std::optional<double> eps,
                    bool zero_centered_weight, bool statistics) {
  const OptionalTensor no_bias;
  const NormArguments a{"rms_norm", input,   normalized_shape,
                        weight,     no_bias, rms_norm_kind(zero_centered_weight)};
  return norm_forward(a, eps_or_default(eps, input), statistics, /*residual=*/nullptr,
                      [&](const NormForwardParams& p) {
                        launch(
                            a.op, a.input,
                            [&](const Kernels& cpu) {
                              parallel(p.rows, p.cols, [&](int64_t begin, int64_t end) {
                                cpu.norm_forward(p, begin, end);
                              });
                            },
                            MEMOPT_CUDA_KERNEL(norm_forward), p);
                      });
}

Tensor rms_norm(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                const OptionalTensor& weight, std::optional<double> eps,
                bool zero_centered_weight) {
  return forward(input, normalized_shape, weight, eps, zero_centered_weight, /*statistics=*/false)
      .output;
}

std::tuple<Tensor, Tensor> _rms_norm_forward(const Tensor& input,
                                             c10::SymIntArrayRef normalized_shape,
                                             const OptionalTensor& weight,
                                             std::optional<double> eps, bool zero_centered_weight) {
  const NormOutputs out =
      forward(input, normalized_shape, weight, eps, zero_centered_weight, /*statistics=*/true);
  return {out.output, out.rstd};
}

NormGradients backward(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                       const OptionalTensor& weight, bool zero_centered_weight,
                       const NormSaved& saved, std::array<bool, 2> output_mask,
                       bool recompute_output) {
  const OptionalTensor no_bias;
  const NormArguments a{"rms_norm backward",
                        input,
                        normalized_shape,
                        weight,
                        no_bias,
                        rms_norm_kind(zero_centered_weight)};
  return norm_backward(
      a, saved, {output_mask[0], output_mask[1], false}, recompute_output,
      [&](const NormBackwardParams& p) {
        launch(
            a.op, a.input,
            [&](const Kernels& cpu) {
              parallel(p.parts, elements_per_part(p),
                       [&](int64_t begin, int64_t end) { cpu.norm_backward(p, begin, end); });
              parallel(p.cols, p.parts,
                       [&](int64_t begin, int64_t end) { cpu.norm_reduce_parts(p, begin, end); });
            },
            MEMOPT_CUDA_KERNEL(norm_backward), p);
      });
}

std::tuple<Tensor, Tensor, Tensor> _rms_norm_backward(
    const Tensor& grad_output, const Tensor& input, c10::SymIntArrayRef normalized_shape,
    const Tensor& rstd, const OptionalTensor& weight, std::array<bool, 2> output_mask,
    bool recompute_output, bool zero_centered_weight) {
  const NormGradients grads =
      backward(input, normalized_shape, weight, zero_centered_weight,
               {grad_output, Tensor(), rstd, std::nullopt}, output_mask, recompute_output);
  return {grads.input, grads.weight, grads.output};
}

std::tuple<Tensor, Tensor> _rms_norm_backward_(const Tensor& grad_output, const Tensor& input,
                                               c10::SymIntArrayRef normalized_shape,
                                               const Tensor& rstd, const OptionalTensor& weight,
                                               bool output_mask, bool recompute_output,
                                               bool zero_centered_weight) {
  const NormGradients grads =
      backward(input, normalized_shape, weight, zero_centered_weight,
               {grad_output, Tensor(), rstd, std::nullopt, /*in_place=*/true}, {true, output_mask},
               recompute_output);
  return {grads.weight, grads.output};
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, CompositeExplicitAutograd, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("_rms_norm_forward", _rms_norm_forward);
  m.impl("_rms_norm_backward", _rms_norm_backward);
  m.impl("_rms_norm_backward_", _rms_norm_backward_);
}

}  // namespace memopt::ops
