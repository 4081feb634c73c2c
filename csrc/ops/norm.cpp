// What the norms share below autograd.
#include "norm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "checks.h"
#include "launch.h"
#include "tensors.h"

namespace memopt::ops {

using at::Tensor;
using kernels::NormBackwardParams;
using kernels::NormForwardParams;

namespace {

void check(const NormArguments& a) {
  check_input(a.op, "input", a.input);
  check_normalized_shape(a.op, a.input, a.normalized_shape);
  check_parameters(a.op, a.input, a.normalized_shape, a.weight, a.bias);
}

// Input's leading dimensions, then a one for each normalised one: as torch.native_layer_norm shapes
// them.
c10::SymDimVector statistics_shape(const NormArguments& a) {
  c10::SymDimVector shape(a.input.sym_sizes().begin(), a.input.sym_sizes().end());
  std::fill(shape.end() - static_cast<std::ptrdiff_t>(a.normalized_shape.size()), shape.end(),
            c10::SymInt(1));
  return shape;
}

// A parameter, contiguous, or null where there is none. One whose storage was freed (sharding does
// that) must not pass for none.
const void* parameter_data(const NormArguments& a, const char* name, const Tensor& parameter) {
  const void* data = const_data(parameter);
  TORCH_CHECK(!parameter.defined() || data != nullptr, a.op, ": ", name,
              " must be in memory, got one whose storage was freed");
  return data;
}

kernels::NormKind kernel_kind(const NormArguments& a) {
  return a.kind == NormKind::kLayerNorm ? kernels::NormKind::kLayerNorm
                                        : kernels::NormKind::kRmsNorm;
}

int64_t columns(const NormArguments& a) {
  int64_t cols = 1;
  for (const c10::SymInt& size : a.normalized_shape) cols *= size.expect_int();
  return cols;
}

kernels::ScalarType parameter_type(const Tensor& weight, const Tensor& bias, const Tensor& input) {
  return scalar_type(weight.defined() ? weight : bias.defined() ? bias : input);
}

// How many parts sum weight gradients: see NormBackwardParams::partials.
int64_t part_count([[maybe_unused]] const char* op, [[maybe_unused]] const Tensor& x, int64_t rows,
                   [[maybe_unused]] int64_t cols) {
#if defined(MEMOPT_WITH_CUDA)
  if (x.is_cuda()) {
    const c10::DeviceGuard guard(x.device());
    int64_t parts = 0;
    const cudaError_t status =
        kernels::cuda::norm_backward_parts(rows, cols, scalar_type(x), &parts);
    TORCH_CHECK(status == cudaSuccess, op, ": ", cudaGetErrorString(status));
    return parts;
  }
#endif
  return kernels::ceil_div(rows, kernels::cpu::norm_rows_per_part(rows));
}

void check_statistics(const NormArguments& a, const char* name, const Tensor& statistics) {
  TORCH_CHECK(statistics.scalar_type() == accumulate_type(a.input) &&
                  statistics.device() == a.input.device() && statistics.is_contiguous(),
              a.op, ": ", name, " must be a contiguous ", accumulate_type(a.input), " tensor on ",
              a.input.device(), ", got ", statistics.scalar_type(), " on ", statistics.device());
  const c10::SymDimVector shape = statistics_shape(a);
  TORCH_CHECK(statistics.sym_sizes().equals(shape), a.op, ": ", name, " must have shape ", shape,
              ", got ", statistics.sym_sizes());
}

}  // namespace

NormOutputs norm_forward(const NormArguments& a, double eps, bool statistics,
                         const Tensor* residual,
                         c10::function_ref<void(const NormForwardParams&)> run) {
  check(a);
  check_eps(a.op, eps);
  if (residual != nullptr) check_like_input(a.op, "residual", *residual, a.input);
  const auto like_input = [&](bool wanted) {
    return wanted ? at::empty_symint(a.input.sym_sizes(), a.input.options()) : Tensor();
  };
  const auto statistic = [&](bool wanted) {
    if (!wanted) return Tensor();
    const auto options = a.input.options().dtype(accumulate_type(a.input));
    return at::empty_symint(statistics_shape(a), options);
  };
  NormOutputs out;
  out.output = like_input(true);
  out.sum = like_input(residual != nullptr);
  out.mean = statistic(statistics && a.kind == NormKind::kLayerNorm);
  out.rstd = statistic(statistics);
  if (a.input.is_meta()) return out;

  const int64_t cols = columns(a);
  const int64_t rows = a.input.numel() / cols;
  const Rows x = as_rows(a.input, rows, cols);
  const Tensor gamma = contiguous_parameter(a.weight);
  const Tensor beta = contiguous_parameter(a.bias);
  NormForwardParams p{};
  p.x = x.data();
  p.gamma = parameter_data(a, "weight", gamma);
  p.beta = parameter_data(a, "bias", beta);
  p.y = out.output.mutable_data_ptr();
  p.mean = mutable_data(out.mean);
  p.rstd = mutable_data(out.rstd);
  p.rows = rows;
  p.cols = cols;
  p.x_row_stride = x.row_stride;
  p.eps = eps;
  p.dtype = scalar_type(a.input);
  p.param_dtype = parameter_type(gamma, beta, a.input);
  p.kind = kernel_kind(a);
  p.zero_centered = a.kind == NormKind::kRmsNormZeroCentered;
  p.stream_stores = exceeds_cache(out.output, residual == nullptr ? 2 : 4);
  std::optional<Rows> added;
  if (residual != nullptr) {
    added = as_rows(*residual, rows, cols);
    p.residual = added->data();
    p.residual_row_stride = added->row_stride;
    p.sum = out.sum.mutable_data_ptr();
  }
  run(p);
  return out;
}

NormGradients norm_backward(const NormArguments& a, const NormSaved& saved,
                            std::array<bool, 3> output_mask, bool recompute_output,
                            c10::function_ref<void(const NormBackwardParams&)> run, bool also) {
  check(a);
  check_like_input(a.op, "grad_output", saved.grad_output, a.input);
  if (a.kind == NormKind::kLayerNorm) check_statistics(a, "mean", saved.mean);
  check_statistics(a, "rstd", saved.rstd);
  const bool has_sum = saved.grad_sum.has_value() && saved.grad_sum->defined();
  if (has_sum) check_like_input(a.op, "grad_sum", *saved.grad_sum, a.input);
  const Tensor gamma = contiguous_parameter(a.weight);
  const Tensor beta = contiguous_parameter(a.bias);
  const auto like_input = [&](bool wanted) {
    return wanted ? at::empty_symint(a.input.sym_sizes(), a.input.options()) : Tensor();
  };
  const auto like_parameter = [&](bool wanted, const Tensor& parameter) {
    return wanted && parameter.defined() ? at::empty_like(parameter) : Tensor();
  };
  if (saved.in_place) check_contiguous(a.op, "grad_output", saved.grad_output);
  const Tensor dx = saved.in_place ? saved.grad_output : like_input(output_mask[0]);
  const Tensor dgamma = like_parameter(output_mask[1], gamma);
  const Tensor dbeta = like_parameter(output_mask[2], beta);
  const Tensor y = like_input(recompute_output);
  const bool anything = dx.defined() || dgamma.defined() || dbeta.defined() || y.defined() || also;
  if (a.input.is_meta() || !anything) return {dx, dgamma, dbeta, y};

  const int64_t cols = columns(a);
  const int64_t rows = a.input.numel() / cols;
  const Rows x = as_rows(a.input, rows, cols);
  const Rows dy = as_rows(saved.grad_output, rows, cols);
  NormBackwardParams p{};
  p.dy = dy.data();
  p.x = x.data();
  p.gamma = parameter_data(a, "weight", gamma);
  p.beta = parameter_data(a, "bias", beta);
  p.mean = const_data(saved.mean);
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
  p.kind = kernel_kind(a);
  p.zero_centered = a.kind == NormKind::kRmsNormZeroCentered;
  p.stream_stores = !saved.in_place && exceeds_cache(a.input, has_sum ? 4 : 3);
  std::optional<Rows> dsum;
  if (has_sum) {
    dsum = as_rows(*saved.grad_sum, rows, cols);
    p.dsum = dsum->data();
    p.dsum_row_stride = dsum->row_stride;
  }
  p.parts = part_count(a.op, a.input, rows, cols);
  Tensor partials;
  if (dgamma.defined() || dbeta.defined()) {
    const int64_t sums = a.kind == NormKind::kLayerNorm ? 2 : 1;
    partials = at::empty({p.parts, sums, cols}, a.input.options().dtype(accumulate_type(a.input)));
    p.partials = partials.mutable_data_ptr();
  }
  run(p);
  return {dx, dgamma, dbeta, y};
}

int64_t elements_per_part(const NormBackwardParams& p) {
  return kernels::cpu::norm_rows_per_part(p.rows) * p.cols;
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_forward(
    const LayerNormArguments& a, double eps, bool statistics,
    c10::function_ref<void(const NormForwardParams&)> run) {
  const NormOutputs out = norm_forward(a, eps, statistics, /*residual=*/nullptr, run);
  return {out.output, out.mean, out.rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_backward(
    const LayerNormArguments& a, const LayerNormSaved& saved, std::array<bool, 3> output_mask,
    bool recompute_output, c10::function_ref<void(const NormBackwardParams&)> run) {
  const NormGradients grads =
      norm_backward(a, {saved.grad_output, saved.mean, saved.rstd, std::nullopt, saved.in_place},
                    output_mask, recompute_output, run);
  return {grads.input, grads.weight, grads.bias, grads.output};
}

}  // namespace memopt::ops
