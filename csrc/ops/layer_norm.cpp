// LayerNorm below autograd.
#include <torch/library.h>

#include "launch.h"
#include "norm.h"

namespace memopt::ops {

using at::Tensor;
using kernels::NormBackwardParams;
using kernels::NormForwardParams;
using kernels::cpu::Kernels;

namespace {

std::tuple<Tensor, Tensor, Tensor> forward(const LayerNormArguments& a, double eps,
                                           bool statistics) {
  return layer_norm_forward(a, eps, statistics, [&](const NormForwardParams& p) {
    launch(
        a.op, a.input,
        [&](const Kernels& cpu) {
          parallel(p.rows, p.cols,
                   [&](int64_t begin, int64_t end) { cpu.norm_forward(p, begin, end); });
        },
        MEMOPT_CUDA_KERNEL(norm_forward), p);
  });
}

Tensor layer_norm(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                  const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  return std::get<0>(
      forward({"layer_norm", input, normalized_shape, weight, bias}, eps, /*statistics=*/false));
}

std::tuple<Tensor, Tensor, Tensor> _layer_norm_forward(const Tensor& input,
                                                       c10::SymIntArrayRef normalized_shape,
                                                       const OptionalTensor& weight,
                                                       const OptionalTensor& bias, double eps) {
  return forward({"layer_norm", input, normalized_shape, weight, bias}, eps, /*statistics=*/true);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const LayerNormArguments& a,
                                                    const LayerNormSaved& saved,
                                                    std::array<bool, 3> output_mask,
                                                    bool recompute_output) {
  return layer_norm_backward(
      a, saved, output_mask, recompute_output, [&](const NormBackwardParams& p) {
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

std::tuple<Tensor, Tensor, Tensor, Tensor> _layer_norm_backward(
    const Tensor& grad_output, const Tensor& input, c10::SymIntArrayRef normalized_shape,
    const Tensor& mean, const Tensor& rstd, const OptionalTensor& weight,
    const OptionalTensor& bias, std::array<bool, 3> output_mask, bool recompute_output) {
  return backward({"layer_norm backward", input, normalized_shape, weight, bias},
                  {grad_output, mean, rstd}, output_mask, recompute_output);
}

std::tuple<Tensor, Tensor, Tensor> _layer_norm_backward_(
    const Tensor& grad_output, const Tensor& input, c10::SymIntArrayRef normalized_shape,
    const Tensor& mean, const Tensor& rstd, const OptionalTensor& weight,
    const OptionalTensor& bias, std::array<bool, 2> output_mask, bool recompute_output) {
  const auto [dx, dweight, dbias, output] =
      backward({"layer_norm backward", input, normalized_shape, weight, bias},
               {grad_output, mean, rstd, /*in_place=*/true}, {true, output_mask[0], output_mask[1]},
               recompute_output);
  return {dweight, dbias, output};
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, CompositeExplicitAutograd, m) {
  m.impl("layer_norm", layer_norm);
  m.impl("_layer_norm_forward", _layer_norm_forward);
  m.impl("_layer_norm_backward", _layer_norm_backward);
  m.impl("_layer_norm_backward_", _layer_norm_backward_);
}

}  // namespace memopt::ops
