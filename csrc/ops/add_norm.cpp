// A residual added in front of a norm, below autograd.
#include "add_norm.h"

#include <torch/library.h>

#include "launch.h"
#include "rms_norm.h"

namespace memopt::ops {
namespace {

using at::Tensor;
using kernels::NormBackwardParams;
using kernels::NormForwardParams;
using kernels::cpu::Kernels;

NormOutputs forward(const NormArguments& a, const Tensor& residual, double eps, bool statistics) {
  return norm_forward(a, eps, statistics, &residual, [&](const NormForwardParams& p) {
    launch(
        a.op, a.input,
        [&](const Kernels& cpu) {
          parallel(p.rows, p.cols,
                   [&](int64_t begin, int64_t end) { cpu.norm_forward(p, begin, end); });
        },
        MEMOPT_CUDA_KERNEL(norm_forward), p);
  });
}

}  // namespace

NormGradients add_norm_backward(const NormArguments& a, const NormSaved& saved,
                                std::array<bool, 3> output_mask, bool recompute_output) {
  return norm_backward(a, saved, output_mask, recompute_output, [&](const NormBackwardParams& p) {
    launch(
        a.op, a.input,
        [&](const Kernels& cpu) {
          parallel(p.parts, elements_per_part(p),
                   [&](int64_t begin, int64_t end) { cpu.norm_backward(p, begin, end); });
          parallel(p.cols, 2 * p.parts,
                   [&](int64_t begin, int64_t end) { cpu.norm_reduce_parts(p, begin, end); });
        },
        MEMOPT_CUDA_KERNEL(norm_backward), p);
  });
}

namespace {

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& input, const Tensor& residual,
                                          c10::SymIntArrayRef normalized_shape,
                                          const OptionalTensor& weight, const OptionalTensor& bias,
                                          double eps) {
  const NormOutputs out = forward({"add_layer_norm", input, normalized_shape, weight, bias},
                                  residual, eps, /*statistics=*/false);
  return {out.output, out.sum};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> _add_layer_norm_forward(
    const Tensor& input, const Tensor& residual, c10::SymIntArrayRef normalized_shape,
    const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  const NormOutputs out = forward({"add_layer_norm", input, normalized_shape, weight, bias},
                                  residual, eps, /*statistics=*/true);
  return {out.output, out.sum, out.mean, out.rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> _add_layer_norm_backward(
    const Tensor& grad_output, const OptionalTensor& grad_sum, const Tensor& sum,
    c10::SymIntArrayRef normalized_shape, const Tensor& mean, const Tensor& rstd,
    const OptionalTensor& weight, const OptionalTensor& bias, std::array<bool, 3> output_mask,
    bool recompute_output) {
  const NormGradients grads =
      add_norm_backward({"add_layer_norm backward", sum, normalized_shape, weight, bias},
                        {grad_output, mean, rstd, grad_sum}, output_mask, recompute_output);
  return {grads.input, grads.weight, grads.bias, grads.output};
}

NormOutputs add_rms_norm_forward(const Tensor& input, const Tensor& residual,
                                 c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                 std::optional<double> eps, bool zero_centered_weight,
                                 bool statistics) {
  const OptionalTensor no_bias;
  return forward({"add_rms_norm", input, normalized_shape, weight, no_bias,
                  rms_norm_kind(zero_centered_weight)},
                 residual, eps_or_default(eps, input), statistics);
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& input, const Tensor& residual,
                                        c10::SymIntArrayRef normalized_shape,
                                        const OptionalTensor& weight, std::optional<double> eps,
                                        bool zero_centered_weight) {
  const NormOutputs out = add_rms_norm_forward(input, residual, normalized_shape, weight, eps,
                                               zero_centered_weight, /*statistics=*/false);
  return {out.output, out.sum};
}

std::tuple<Tensor, Tensor, Tensor> _add_rms_norm_forward(
    const Tensor& input, const Tensor& residual, c10::SymIntArrayRef normalized_shape,
    const OptionalTensor& weight, std::optional<double> eps, bool zero_centered_weight) {
  const NormOutputs out = add_rms_norm_forward(input, residual, normalized_shape, weight, eps,
                                               zero_centered_weight, /*statistics=*/true);
  return {out.output, out.sum, out.rstd};
}

std::tuple<Tensor, Tensor, Tensor> _add_rms_norm_backward(
    const Tensor& grad_output, const OptionalTensor& grad_sum, const Tensor& sum,
    c10::SymIntArrayRef normalized_shape, const Tensor& rstd, const OptionalTensor& weight,
    std::array<bool, 2> output_mask, bool recompute_output, bool zero_centered_weight) {
  const OptionalTensor no_bias;
  const Tensor no_mean;
  const NormGradients grads =
      add_norm_backward({"add_rms_norm backward", sum, normalized_shape, weight, no_bias,
                         rms_norm_kind(zero_centered_weight)},
                        {grad_output, no_mean, rstd, grad_sum},
                        {output_mask[0], output_mask[1], false}, recompute_output);
  return {grads.input, grads.weight, grads.output};
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, CompositeExplicitAutograd, m) {
  m.impl("add_layer_norm", add_layer_norm);
  m.impl("_add_layer_norm_forward", _add_layer_norm_forward);
  m.impl("_add_layer_norm_backward", _add_layer_norm_backward);
  m.impl("add_rms_norm", add_rms_norm);
  m.impl("_add_rms_norm_forward", _add_rms_norm_forward);
  m.impl("_add_rms_norm_backward", _add_rms_norm_backward);
}

}  // namespace memopt::ops
