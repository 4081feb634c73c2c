// LayerNorm below autograd.
#include "layer_norm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "checks.h"
#include "launch.h"
#include "tensors.h"

namespace memopt::ops {

using at::Tensor;
using kernels::LayerNormBackwardParams;
using kernels::LayerNormForwardParams;
using kernels::cpu::Kernels;

namespace {

void check(const LayerNormArguments& a) {
  check_input(a.op, "input", a.input);
  check_normalized_shape(a.op, a.input, a.normalized_shape);
  check_parameters(a.op, a.input, a.normalized_shape, a.weight, a.bias);
}

// Input's leading dimensions, then a one for each normalised one: as torch.native_layer_norm shapes
// them.
c10::SymDimVector statistics_shape(const LayerNormArguments& a) {
  c10::SymDimVector shape(a.input.sym_sizes().begin(), a.input.sym_sizes().end());
  std::fill(shape.end() - static_cast<std::ptrdiff_t>(a.normalized_shape.size()), shape.end(),
            c10::SymInt(1));
  return shape;
}

int64_t columns(const LayerNormArguments& a) {
  int64_t cols = 1;
  for (const c10::SymInt& size : a.normalized_shape) cols *= size.expect_int();
  return cols;
}

kernels::ScalarType parameter_type(const Tensor& weight, const Tensor& bias, const Tensor& input) {
  return scalar_type(weight.defined() ? weight : bias.defined() ? bias : input);
}

// How many parts sum weight gradients: see LayerNormBackwardParams::partials.
int64_t part_count([[maybe_unused]] const char* op, [[maybe_unused]] const Tensor& x, int64_t rows,
                   [[maybe_unused]] int64_t cols) {
#if defined(MEMOPT_WITH_CUDA)
  if (x.is_cuda()) {
    const c10::DeviceGuard guard(x.device());
    int64_t parts = 0;
    const cudaError_t status =
        kernels::cuda::layer_norm_backward_parts(rows, cols, scalar_type(x), &parts);
    TORCH_CHECK(status == cudaSuccess, op, ": ", cudaGetErrorString(status));
    return parts;
  }
#endif
  return kernels::ceil_div(rows, kernels::cpu::layer_norm_rows_per_part(rows));
}

void check_statistics(const LayerNormArguments& a, const char* name, const Tensor& statistics) {
  TORCH_CHECK(statistics.scalar_type() == accumulate_type(a.input) &&
                  statistics.device() == a.input.device() && statistics.is_contiguous(),
              a.op, ": ", name, " must be a contiguous ", accumulate_type(a.input), " tensor on ",
              a.input.device(), ", got ", statistics.scalar_type(), " on ", statistics.device());
  const c10::SymDimVector shape = statistics_shape(a);
  TORCH_CHECK(statistics.sym_sizes().equals(shape), a.op, ": ", name, " must have shape ", shape,
              ", got ", statistics.sym_sizes());
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> layer_norm_forward(
    const LayerNormArguments& a, double eps, bool statistics,
    c10::function_ref<void(const LayerNormForwardParams&)> run) {
  check(a);
  check_eps(a.op, eps);
  const Tensor y = at::empty_symint(a.input.sym_sizes(), a.input.options());
  Tensor mean;
  Tensor rstd;
  if (statistics) {
    const auto options = a.input.options().dtype(accumulate_type(a.input));
    mean = at::empty_symint(statistics_shape(a), options);
    rstd = at::empty_symint(statistics_shape(a), options);
  }
  if (a.input.is_meta()) return {y, mean, rstd};

  const int64_t cols = columns(a);
  const int64_t rows = a.input.numel() / cols;
  const Rows x = as_rows(a.input, rows, cols);
  const Tensor gamma = contiguous_parameter(a.weight);
  const Tensor beta = contiguous_parameter(a.bias);
  LayerNormForwardParams p{};
  p.x = x.data();
  p.gamma = const_data(gamma);
  p.beta = const_data(beta);
  p.y = y.mutable_data_ptr();
  p.mean = mutable_data(mean);
  p.rstd = mutable_data(rstd);
  p.rows = rows;
  p.cols = cols;
  p.x_row_stride = x.row_stride;
  p.eps = eps;
  p.dtype = scalar_type(a.input);
  p.param_dtype = parameter_type(gamma, beta, a.input);
  p.stream_stores = exceeds_cache(y, 2);
  run(p);
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_backward(
    const LayerNormArguments& a, const LayerNormSaved& saved, std::array<bool, 3> output_mask,
    bool recompute_output, c10::function_ref<void(const LayerNormBackwardParams&)> run) {
  check(a);
  check_like_input(a.op, "grad_output", saved.grad_output, a.input);
  check_statistics(a, "mean", saved.mean);
  check_statistics(a, "rstd", saved.rstd);
  const Tensor gamma = contiguous_parameter(a.weight);
  const Tensor beta = contiguous_parameter(a.bias);
  const auto like_input = [&](bool wanted) {
    return wanted ? at::empty_symint(a.input.sym_sizes(), a.input.options()) : Tensor();
  };
  const auto like_parameter = [&](bool wanted, const Tensor& parameter) {
    return wanted && parameter.defined() ? at::empty_like(parameter) : Tensor();
  };
  const Tensor dx = like_input(output_mask[0]);
  const Tensor dgamma = like_parameter(output_mask[1], gamma);
  const Tensor dbeta = like_parameter(output_mask[2], beta);
  const Tensor y = like_input(recompute_output);
  const bool anything = dx.defined() || dgamma.defined() || dbeta.defined() || y.defined();
  if (a.input.is_meta() || !anything) return {dx, dgamma, dbeta, y};

  const int64_t cols = columns(a);
  const int64_t rows = a.input.numel() / cols;
  const Rows x = as_rows(a.input, rows, cols);
  const Rows dy = as_rows(saved.grad_output, rows, cols);
  LayerNormBackwardParams p{};
  p.dy = dy.data();
  p.x = x.data();
  p.gamma = const_data(gamma);
  p.beta = const_data(beta);
  p.mean = saved.mean.const_data_ptr();
  p.rstd = saved.rstd.const_data_ptr();
  p.dx = mutable_data(dx);
  p.y = mutable_data(y);
  p.dgamma = mutable_data(dgamma);
  p.dbeta = mutable_data(dbeta);
  p.rows = rows;
  p.cols = cols;
  p.dy_row_stride = dy.row_stride;
  p.x_row_stride = x.row_stride;
  p.dtype = scalar_type(a.input);
  p.param_dtype = parameter_type(gamma, beta, a.input);
  p.stream_stores = exceeds_cache(a.input, 3);
  p.parts = part_count(a.op, a.input, rows, cols);
  Tensor partials;
  if (dgamma.defined() || dbeta.defined()) {
    partials = at::empty({p.parts, 2, cols}, a.input.options().dtype(accumulate_type(a.input)));
    p.partials = partials.mutable_data_ptr();
  }
  run(p);
  return {dx, dgamma, dbeta, y};
}

int64_t elements_per_part(const LayerNormBackwardParams& p) {
  return kernels::cpu::layer_norm_rows_per_part(p.rows) * p.cols;
}

namespace {

std::tuple<Tensor, Tensor, Tensor> forward(const LayerNormArguments& a, double eps,
                                           bool statistics) {
  return layer_norm_forward(a, eps, statistics, [&](const LayerNormForwardParams& p) {
    launch(
        a.op, a.input,
        [&](const Kernels& cpu) {
          parallel(p.rows, p.cols,
                   [&](int64_t begin, int64_t end) { cpu.layer_norm_forward(p, begin, end); });
        },
        MEMOPT_CUDA_KERNEL(layer_norm_forward), p);
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

std::tuple<Tensor, Tensor, Tensor, Tensor> _layer_norm_backward(
    const Tensor& grad_output, const Tensor& input, c10::SymIntArrayRef normalized_shape,
    const Tensor& mean, const Tensor& rstd, const OptionalTensor& weight,
    const OptionalTensor& bias, std::array<bool, 3> output_mask, bool recompute_output) {
  const LayerNormArguments a{"layer_norm backward", input, normalized_shape, weight, bias};
  return layer_norm_backward(
      a, {grad_output, mean, rstd}, output_mask, recompute_output,
      [&](const LayerNormBackwardParams& p) {
        launch(
            a.op, a.input,
            [&](const Kernels& cpu) {
              parallel(p.parts, elements_per_part(p),
                       [&](int64_t begin, int64_t end) { cpu.layer_norm_backward(p, begin, end); });
              parallel(p.cols, 2 * p.parts, [&](int64_t begin, int64_t end) {
                cpu.layer_norm_reduce_parts(p, begin, end);
              });
            },
            MEMOPT_CUDA_KERNEL(layer_norm_backward), p);
      });
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, CompositeExplicitAutograd, m) {
  m.impl("layer_norm", layer_norm);
  m.impl("_layer_norm_forward", _layer_norm_forward);
  m.impl("_layer_norm_backward", _layer_norm_backward);
}

}  // namespace memopt::ops
