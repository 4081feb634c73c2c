// LayerNorm with GELU behind it, below autograd.
#include <torch/library.h>

#include <string_view>

#include "checks.h"
#include "launch.h"
#include "norm.h"

namespace memopt::ops {
namespace {

using at::Tensor;
using kernels::NormBackwardParams;
using kernels::NormForwardParams;
using kernels::cpu::Kernels;

std::tuple<Tensor, Tensor, Tensor> forward(const LayerNormArguments& a, double eps,
                                           std::string_view approximate, bool statistics) {
  const kernels::Activation kind = parse_approximate(a.op, approximate);
  return layer_norm_forward(a, eps, statistics, [&](NormForwardParams p) {
    p.activation.kind = kind;
    launch(
        a.op, a.input,
        [&](const Kernels& cpu) {
          parallel(p.rows, p.cols,
                   [&](int64_t begin, int64_t end) { cpu.norm_forward(p, begin, end); });
        },
        MEMOPT_CUDA_KERNEL(norm_forward), p);
  });
}

Tensor layer_norm_gelu(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                       const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                       std::string_view approximate) {
  return std::get<0>(forward({"layer_norm_gelu", input, normalized_shape, weight, bias}, eps,
                             approximate, /*statistics=*/false));
}

std::tuple<Tensor, Tensor, Tensor> _layer_norm_gelu_forward(const Tensor& input,
                                                            c10::SymIntArrayRef normalized_shape,
                                                            const OptionalTensor& weight,
                                                            const OptionalTensor& bias, double eps,
                                                            std::string_view approximate) {
  return forward({"layer_norm_gelu", input, normalized_shape, weight, bias}, eps, approximate,
                 /*statistics=*/true);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> _layer_norm_gelu_backward(
    const Tensor& grad_output, const Tensor& input, c10::SymIntArrayRef normalized_shape,
    const Tensor& mean, const Tensor& rstd, const OptionalTensor& weight,
    const OptionalTensor& bias, std::array<bool, 3> output_mask, bool recompute_output,
    std::string_view approximate) {
  const LayerNormArguments a{"layer_norm_gelu backward", input, normalized_shape, weight, bias};
  const kernels::Activation kind = parse_approximate(a.op, approximate);
  return layer_norm_backward(
      a, {grad_output, mean, rstd}, output_mask, recompute_output, [&](NormBackwardParams p) {
        p.activation.kind = kind;
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

}  // namespace

TORCH_LIBRARY_IMPL(memopt, CompositeExplicitAutograd, m) {
  m.impl("layer_norm_gelu", layer_norm_gelu);
  m.impl("_layer_norm_gelu_forward", _layer_norm_gelu_forward);
  m.impl("_layer_norm_gelu_backward", _layer_norm_gelu_backward);
}

}  // namespace memopt::ops
