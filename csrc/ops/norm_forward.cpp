// Forward of the norms below autograd.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <array>
#include <limits>
#include <string_view>
#include <tuple>

#include "checks.h"
#include "declare.h"
#include "dropout.h"
#include "launch.h"
#include "layout.h"
#include "norm.h"
#include "private_ops.h"
#include "tensors.h"

namespace memopt::ops {
namespace {

using kernels::NormForwardParams;
using kernels::cpu::Kernels;

// PyTorch's defaults: 1e-5 for layer_norm; for rms_norm the distance from 1 to the next number of
// the type that is computed in.
double checked_eps(const Norm& norm, std::optional<double> eps, const Tensor& v) {
  if (!eps.has_value() && norm.is_layer_norm()) return 1e-5;
  if (!eps.has_value()) {
    return v.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                          : std::numeric_limits<float>::epsilon();
  }
  check_eps(norm.op(), *eps);
  return *eps;
}

Tensor empty_statistic(const NormArguments& a, bool wanted) {
  if (!wanted) return Tensor();
  return at::empty_symint(statistics_shape(a), a.v.options().dtype(accumulate_type(a.v)));
}

// Uninitialised: input + residual by PyTorch's ops, input perhaps dropped before.
Tensor empty_sum(const Tensor& input, const Tensor& residual, bool drops) {
  if (!drops || input.is_contiguous_or_false()) return empty_elementwise({input, residual});
  const auto sizes = input.sym_sizes();
  const c10::SymDimVector dropped = elementwise_strides(sizes, input.sym_strides());
  return at::empty_strided_symint(
      sizes, elementwise_strides(sizes, {dropped, residual.sym_strides()}), input.options());
}

struct Outputs {
  Tensor output;
  Tensor sum;   // undefined without a residual
  Tensor mean;  // these undefined without a backward; the mean for RMSNorm
  Tensor rstd;
};

// `draw` says what is dropped; null: nothing. Not called for meta tensors.
Outputs forward(const Norm& norm, const NormArguments& a, const OptionalTensor& residual,
                std::optional<double> eps_or_default, bool for_backward,
                c10::function_ref<Drop()>* draw) {
  const char* op = norm.op();
  check_norm(norm, a);
  const double eps = checked_eps(norm, eps_or_default, a.v);
  const bool adds = is_given(residual);
  if (adds) check_like_input(op, "residual", *residual, a.v);
  const Tensor sum = adds ? empty_sum(a.v, *residual, draw != nullptr) : Tensor();
  const NormArguments normed{adds ? sum : a.v, a.normalized_dims, a.weight, a.bias};
  const Outputs out{empty_like_v(norm, normed, true, normed.v), sum,
                    empty_statistic(a, for_backward && norm.is_layer_norm()),
                    empty_statistic(a, for_backward)};
  if (a.v.is_meta()) return out;

  const Tensor y = contiguous_buffer(out.output), v = contiguous_buffer(out.sum);
  const int64_t cols = a.cols();
  const int64_t rows = a.v.numel() / cols;
  const Rows x = as_rows(a.v, rows, cols);
  const Rows added = adds ? as_rows(*residual, rows, cols) : Rows{Tensor(), 0};
  const Tensor gamma = contiguous_parameter(a.weight), beta = contiguous_parameter(a.bias);
  NormForwardParams p{};
  p.x = x.data();
  p.gamma = parameter_data(norm.op(), "weight", gamma);
  p.beta = parameter_data(norm.op(), "bias", beta);
  p.y = y.mutable_data_ptr();
  p.mean = mutable_data(out.mean);
  p.rstd = mutable_data(out.rstd);
  p.rows = rows;
  p.cols = cols;
  p.x_row_stride = x.row_stride;
  p.eps = eps;
  p.dtype = scalar_type(a.v);
  p.param_dtype = parameter_type(gamma, beta, a.v);
  p.stream_stores = exceeds_cache(out.output, adds ? 4 : 2);
  p.kind = norm.kind;
  p.zero_centered = norm.zero_centered;
  p.activation = norm.activation;
  p.residual = const_data(added.tensor);
  p.residual_row_stride = added.row_stride;
  p.sum = mutable_data(v);
  Drop drop{};
  if (draw != nullptr) {
    drop = (*draw)();
    p.drops = true;
    p.rule = drop.rule;
    p.state = drop.state;
  }
  launch(
      op, a.v,
      [&](const Kernels& cpu) {
        leave_state(drop);
        parallel(rows, cols, [&](int64_t begin, int64_t end) { cpu.norm_forward(p, begin, end); });
      },
      MEMOPT_CUDA_KERNEL(norm_forward), p);
  deliver(y, out.output);
  deliver(v, out.sum);
  return out;
}

}  // namespace

Results4 _norm_forward(const Tensor& input, const OptionalTensor& residual, int64_t normalized_dims,
                       const OptionalTensor& weight, const OptionalTensor& bias,
                       std::optional<double> eps, std::string_view kind, bool zero_centered_weight,
                       NormActivation activation, bool for_backward) {
  const Norm norm = parse_norm(kind, zero_centered_weight, activation, {is_given(residual)},
                               /*backward=*/false);
  const Outputs out = forward(norm, {input, normalized_dims, weight, bias}, residual, eps,
                              for_backward, /*draw=*/nullptr);
  return {out.output, out.sum, out.mean, out.rstd};
}

Results5 _dropout_add_norm_forward(const Tensor& input, const Tensor& residual,
                                   const OptionalTensor& rng_state, double p,
                                   int64_t normalized_dims, const OptionalTensor& weight,
                                   const OptionalTensor& bias, std::optional<double> eps,
                                   std::string_view kind, bool zero_centered_weight,
                                   bool for_backward) {
  const Norm norm = parse_norm(kind, zero_centered_weight, std::nullopt, {true, true},
                               /*backward=*/false);
  check_input(norm.op(), "input", input);
  check_p(norm.op(), p);
  const StateArgument state = state_argument(norm.op(), rng_state, input, for_backward);
  const auto draw = [&] { return drawn_drop(input, p, state.given, state.drawn); };
  c10::function_ref<Drop()> drop(draw);
  const Outputs out =
      forward(norm, {input, normalized_dims, weight, bias}, residual, eps, for_backward, &drop);
  return {out.output, out.sum, out.mean, out.rstd, state.drawn};
}

// One function serves the CPU, CUDA and meta; every other backend gets check_input's error.
MEMOPT_DECLARE_PRIVATE(
    _norm_forward, {},
    "_norm_forward(Tensor input, Tensor? residual, int normalized_dims, Tensor? weight,"
    " Tensor? bias, float? eps, *, str norm, bool zero_centered_weight=False,"
    " str? activation=None, bool for_backward=True)"
    " -> (Tensor output, Tensor sum, Tensor mean, Tensor rstd)");
MEMOPT_DECLARE_PRIVATE(
    _dropout_add_norm_forward, kDrawsRandomNumbers,
    "_dropout_add_norm_forward(Tensor input, Tensor residual, Tensor? rng_state, float p,"
    " int normalized_dims, Tensor? weight, Tensor? bias, float? eps, *, str norm,"
    " bool zero_centered_weight=False, bool for_backward=True)"
    " -> (Tensor output, Tensor sum, Tensor mean, Tensor rstd, Tensor rng_state)");

}  // namespace memopt::ops
