// LayerNorm with GELU behind it, below autograd.
#include <torch/library.h>

#include <string_view>

#include "../kernels/layer_norm_gelu.h"
#include "checks.h"
#include "launch.h"
#include "norm.h"

namespace memopt::ops {
namespace {

using at::Tensor;
using kernels::LayerNormBackwardParams;
using kernels::LayerNormForwardParams;
using kernels::LayerNormGeluBackwardParams;
using kernels::LayerNormGeluForwardParams;
using kernels::cpu::Kernels;

std::tuple<Tensor, Tensor, Tensor> forward(const LayerNormArguments& a, double eps,
                                           std::string_view approximate, bool statistics) {
  const kernels::GeluKind kind = parse_approximate(a.op, approximate);
  return layer_norm_forward(a, eps, statistics, [&](const LayerNormForwardParams& norm) {
    const LayerNormGeluForwardParams p{norm, kind};
    launch(
        a.op, a.input,
        [&](const Kernels& cpu) {
          parallel(norm.rows, norm.cols,
                   [&](int64_t begin, int64_t end) { cpu.layer_norm_gelu_forward(p, begin, end); });
        },
        MEMOPT_CUDA_KERNEL(layer_norm_gelu_forward), p);
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
  const kernels::GeluKind kind = parse_approximate(a.op, approximate);
  return layer_norm_backward(
      a, {grad_output, mean, rstd}, output_mask, recompute_output,
      [&](const LayerNormBackwardParams& norm) {
        const LayerNormGeluBackwardParams p{norm, kind};
        launch(
            a.op, a.input,
            [&](const Kernels& cpu) {
              parallel(norm.parts, elements_per_part(norm), [&](int64_t begin, int64_t end) {
                cpu.layer_norm_gelu_backward(p, begin, end);
              });
              parallel(norm.cols, 2 * norm.parts, [&](int64_t begin, int64_t end) {
                cpu.layer_norm_reduce_parts(norm, begin, end);
              });
            },
            MEMOPT_CUDA_KERNEL(layer_norm_gelu_backward), p);
      });
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, CompositeExplicitAutograd, m) {
  m.impl("layer_norm_gelu", layer_norm_gelu);
  m.impl("_layer_norm_gelu_forward", _layer_norm_gelu_forward);
  m.impl("_layer_norm_gelu_backward", _layer_norm_gelu_backward);
}

}  // namespace memopt::ops
