// A residual added in front of a norm, below autograd.
#include "add_norm.h"

#include <torch/library.h>

#include "launch.h"
#include "rms_norm.h"

#if defined(MEMOPT_WITH_CUDA)
using CudaBackward = cudaError_t(const memopt::kernels::NormBackwardParams&, cudaStream_t);
#else
using CudaBackward = void();
#endif

namespace memopt::ops {
namespace {

using at::Tensor;
using kernels::NormBackwardParams;
using kernels::NormForwardParams;
using kernels::cpu::Kernels;

NormOutputs forward(const NormArguments& a, const Tensor& residual, double eps, bool statistics) {
  const bool layer_norm = a.kind == NormKind::kLayerNorm;
  return norm_forward(a, eps, statistics, &residual, [&](const NormForwardParams& p) {
    const auto cpu = [&](const Kernels& cpu) {
      const auto kernel = layer_norm ? cpu.add_layer_norm_forward : cpu.add_rms_norm_forward;
      parallel(p.rows, p.cols, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
    };
    layer_norm ? launch(a.op, a.input, cpu, MEMOPT_CUDA_KERNEL(add_layer_norm_forward), p)
               : launch(a.op, a.input, cpu, MEMOPT_CUDA_KERNEL(add_rms_norm_forward), p);
  });
}

// The kernels of one norm's backward.
struct BackwardKernels {
  using Cpu = void (*Kernels::*)(const NormBackwardParams&, int64_t, int64_t);
  Cpu with_grad_sum;
  Cpu alone;  // the norm's own
  Cpu reduce_parts;
  CudaBackward* cuda_with_grad_sum;
  CudaBackward* cuda_alone;
};

constexpr BackwardKernels kLayerNormKernels{
    &Kernels::add_layer_norm_backward, &Kernels::layer_norm_backward,
    &Kernels::layer_norm_reduce_parts, MEMOPT_CUDA_KERNEL(add_layer_norm_backward),
    MEMOPT_CUDA_KERNEL(layer_norm_backward)};
constexpr BackwardKernels kRmsNormKernels{
    &Kernels::add_rms_norm_backward, &Kernels::rms_norm_backward, &Kernels::rms_norm_reduce_parts,
    MEMOPT_CUDA_KERNEL(add_rms_norm_backward), MEMOPT_CUDA_KERNEL(rms_norm_backward)};

}  // namespace

NormGradients add_norm_backward(const NormArguments& a, const NormSaved& saved,
                                std::array<bool, 3> output_mask, bool recompute_output) {
  const BackwardKernels& kernels =
      a.kind == NormKind::kLayerNorm ? kLayerNormKernels : kRmsNormKernels;
  return norm_backward(a, saved, output_mask, recompute_output, [&](const NormBackwardParams& p) {
    const bool alone = p.dsum == nullptr;
    launch(
        a.op, a.input,
        [&](const Kernels& cpu) {
          const auto kernel = cpu.*(alone ? kernels.alone : kernels.with_grad_sum);
          parallel(p.parts, elements_per_part(p),
                   [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
          parallel(p.cols, 2 * p.parts,
                   [&](int64_t begin, int64_t end) { (cpu.*kernels.reduce_parts)(p, begin, end); });
        },
        alone ? kernels.cuda_alone : kernels.cuda_with_grad_sum, p);
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
