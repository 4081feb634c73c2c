// Backward of the norms below autograd.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <array>
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

using kernels::NormBackwardParams;
using kernels::cpu::Kernels;

struct Saved {
  const Tensor& grad_output;
  const OptionalTensor& grad_sum;  // of the sum with a residual
  const OptionalTensor& mean;      // none for RMSNorm
  const Tensor& rstd;
};

// What is wanted, and where it goes. Undefined where it is not wanted.
struct Gradients {
  Tensor v;  // may be grad_output, contiguous
  Tensor weight;
  Tensor bias;
  Tensor output;   // re-emitted
  Tensor dropped;  // v's, through dropout

  bool any() const {
    return v.defined() || weight.defined() || bias.defined() || output.defined() ||
           dropped.defined();
  }
};

void check_statistics(const Norm& norm, const NormArguments& a, const char* name,
                      const Tensor& statistics) {
  TORCH_CHECK(statistics.defined(), norm.op(), ": ", name, " must be a tensor, got None");
  TORCH_CHECK(statistics.scalar_type() == accumulate_type(a.v) &&
                  statistics.device() == a.v.device() && statistics.is_contiguous(),
              norm.op(), ": ", name, " must be a contiguous ", accumulate_type(a.v), " tensor on ",
              a.v.device(), ", got ", statistics.scalar_type(), " on ", statistics.device());
  const c10::SymDimVector shape = statistics_shape(a);
  TORCH_CHECK(statistics.sym_sizes().equals(shape), norm.op(), ": ", name, " must have shape ",
              shape, ", got ", statistics.sym_sizes());
}

void check_backward(const Norm& norm, const NormArguments& a, const Saved& saved) {
  check_norm(norm, a);
  check_like_input(norm.op(), "grad_output", saved.grad_output, a.v);
  if (norm.is_layer_norm()) check_statistics(norm, a, "mean", saved.mean.value_or(Tensor()));
  check_statistics(norm, a, "rstd", saved.rstd);
  if (is_given(saved.grad_sum)) {
    check_like_input(norm.op(), "grad_sum", *saved.grad_sum, a.v);
  }
}

// Of v. PyTorch adds the norm's part to the sum's own gradient.
Tensor empty_v_gradient(const Norm& norm, const NormArguments& a, const Saved& saved, bool wanted) {
  if (wanted && is_given(saved.grad_sum)) return empty_elementwise(*saved.grad_sum);
  return empty_like_v(norm, a, wanted, saved.grad_output);
}

// Of weight and bias, where wanted and there.
Tensor empty_parameter_gradient(bool wanted, const OptionalTensor& parameter) {
  const bool there = parameter.has_value() && parameter->defined();
  return wanted && there ? at::empty_like(*parameter, at::MemoryFormat::Contiguous) : Tensor();
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

void backward(const Norm& norm, const NormArguments& a, const Saved& saved, const Gradients& to,
              const kernels::DropoutRule& rule = {}) {
  if (a.v.is_meta() || !to.any()) return;
  const bool in_place = to.v.is_same(saved.grad_output);
  const bool has_sum = is_given(saved.grad_sum);
  const int64_t cols = a.cols();
  const int64_t rows = a.v.numel() / cols;
  const Rows x = as_rows(a.v, rows, cols);
  const Rows dy = as_rows(saved.grad_output, rows, cols);
  const Rows dsum = has_sum ? as_rows(*saved.grad_sum, rows, cols) : Rows{Tensor(), 0};
  const Tensor gamma = contiguous_parameter(a.weight), beta = contiguous_parameter(a.bias);
  NormBackwardParams p{};
  p.dy = dy.data();
  p.x = x.data();
  p.gamma = parameter_data(norm.op(), "weight", gamma);
  p.beta = parameter_data(norm.op(), "bias", beta);
  p.mean = const_data(saved.mean.value_or(Tensor()));
  p.rstd = saved.rstd.const_data_ptr();
  const Tensor dx = contiguous_buffer(to.v), y = contiguous_buffer(to.output);
  const Tensor dropped = contiguous_buffer(to.dropped);
  p.dx = mutable_data(dx);
  p.y = mutable_data(y);
  p.dgamma = mutable_data(to.weight);
  p.dbeta = mutable_data(to.bias);
  p.rows = rows;
  p.cols = cols;
  p.dy_row_stride = dy.row_stride;
  p.x_row_stride = x.row_stride;
  p.dtype = scalar_type(a.v);
  p.param_dtype = parameter_type(gamma, beta, a.v);
  const int64_t tensors = 3 + (has_sum ? 1 : 0) + (to.dropped.defined() ? 1 : 0);
  p.stream_stores = !in_place && exceeds_cache(a.v, tensors);
  p.kind = norm.kind;
  p.zero_centered = norm.zero_centered;
  p.activation = norm.activation;
  p.dsum = const_data(dsum.tensor);
  p.dsum_row_stride = dsum.row_stride;
  p.dx_dropped = mutable_data(dropped);
  p.rule = rule;
  p.parts = part_count(norm.op(), a.v, rows, cols);
  Tensor partials;
  if (to.weight.defined() || to.bias.defined()) {
    const int64_t sums = norm.is_layer_norm() ? 2 : 1;
    partials = at::empty({p.parts, sums, cols}, a.v.options().dtype(accumulate_type(a.v)));
    p.partials = partials.mutable_data_ptr();
  }
  launch(
      norm.op(), a.v,
      [&](const Kernels& cpu) {
        parallel(p.parts, kernels::cpu::norm_rows_per_part(rows) * cols,
                 [&](int64_t begin, int64_t end) { cpu.norm_backward(p, begin, end); });
        parallel(cols, 2 * p.parts,
                 [&](int64_t begin, int64_t end) { cpu.norm_reduce_parts(p, begin, end); });
      },
      MEMOPT_CUDA_KERNEL(norm_backward), p);
  deliver(dx, to.v);
  deliver(y, to.output);
  deliver(dropped, to.dropped);
}

}  // namespace

Results4 _norm_backward(const Tensor& grad_output, const OptionalTensor& grad_sum, const Tensor& x,
                        int64_t normalized_dims, const OptionalTensor& mean, const Tensor& rstd,
                        const OptionalTensor& weight, const OptionalTensor& bias,
                        std::array<bool, 3> output_mask, bool recompute_output,
                        std::string_view kind, bool zero_centered_weight,
                        NormActivation activation) {
  const Norm norm = parse_norm(kind, zero_centered_weight, activation, {is_given(grad_sum)},
                               /*backward=*/true);
  const NormArguments a{x, normalized_dims, weight, bias};
  const Saved saved{grad_output, grad_sum, mean, rstd};
  check_backward(norm, a, saved);
  const Gradients to{empty_v_gradient(norm, a, saved, output_mask[0]),
                     empty_parameter_gradient(output_mask[1], weight),
                     empty_parameter_gradient(output_mask[2], bias),
                     empty_like_v(norm, a, recompute_output, x), Tensor()};
  backward(norm, a, saved, to);
  return {to.v, to.weight, to.bias, to.output};
}

Results3 _norm_backward_(const Tensor& grad_output, const Tensor& x, int64_t normalized_dims,
                         const OptionalTensor& mean, const Tensor& rstd,
                         const OptionalTensor& weight, const OptionalTensor& bias,
                         std::array<bool, 2> output_mask, bool recompute_output,
                         std::string_view kind, bool zero_centered_weight,
                         NormActivation activation) {
  const Norm norm = parse_norm(kind, zero_centered_weight, activation, {}, /*backward=*/true);
  const NormArguments a{x, normalized_dims, weight, bias};
  const OptionalTensor no_grad_sum;
  const Saved saved{grad_output, no_grad_sum, mean, rstd};
  check_backward(norm, a, saved);
  check_contiguous(norm.op(), "grad_output", grad_output);
  const Gradients to{grad_output, empty_parameter_gradient(output_mask[0], weight),
                     empty_parameter_gradient(output_mask[1], bias),
                     empty_like_v(norm, a, recompute_output, x), Tensor()};
  backward(norm, a, saved, to);
  return {to.weight, to.bias, to.output};
}

Results5 _dropout_add_norm_backward(const Tensor& grad_output, const OptionalTensor& grad_sum,
                                    const Tensor& sum, const Tensor& rng_state, double p,
                                    int64_t normalized_dims, const OptionalTensor& mean,
                                    const Tensor& rstd, const OptionalTensor& weight,
                                    const OptionalTensor& bias, std::array<bool, 4> output_mask,
                                    bool recompute_output, std::string_view kind,
                                    bool zero_centered_weight) {
  const Norm norm = parse_norm(kind, zero_centered_weight, std::nullopt, {true, true},
                               /*backward=*/true);
  check_p(norm.op(), p);
  check_input(norm.op(), "sum", sum);
  check_state(norm.op(), rng_state, "sum", sum);
  const NormArguments a{sum, normalized_dims, weight, bias};
  const Saved saved{grad_output, grad_sum, mean, rstd};
  check_backward(norm, a, saved);
  const Gradients to{empty_v_gradient(norm, a, saved, output_mask[1]),
                     empty_parameter_gradient(output_mask[2], weight),
                     empty_parameter_gradient(output_mask[3], bias),
                     empty_like_v(norm, a, recompute_output, sum),
                     empty_v_gradient(norm, a, saved, output_mask[0])};
  Drop drop{};
  if (to.dropped.defined() && !sum.is_meta()) drop = given_drop(rng_state, p);
  backward(norm, a, saved, to, drop.rule);
  return {to.dropped, to.v, to.weight, to.bias, to.output};
}

MEMOPT_DECLARE_PRIVATE(
    _norm_backward, {},
    "_norm_backward(Tensor grad_output, Tensor? grad_sum, Tensor x, int normalized_dims,"
    " Tensor? mean, Tensor rstd, Tensor? weight, Tensor? bias, bool[3] output_mask,"
    " bool recompute_output=False, *, str norm, bool zero_centered_weight=False,"
    " str? activation=None)"
    " -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias, Tensor output)");
MEMOPT_DECLARE_PRIVATE(
    _norm_backward_, {},
    "_norm_backward_(Tensor(a!) grad_output, Tensor x, int normalized_dims, Tensor? mean,"
    " Tensor rstd, Tensor? weight, Tensor? bias, bool[2] output_mask,"
    " bool recompute_output=False, *, str norm, bool zero_centered_weight=False,"
    " str? activation=None) -> (Tensor grad_weight, Tensor grad_bias, Tensor output)");
MEMOPT_DECLARE_PRIVATE(
    _dropout_add_norm_backward, {},
    "_dropout_add_norm_backward(Tensor grad_output, Tensor? grad_sum, Tensor sum,"
    " Tensor rng_state, float p, int normalized_dims, Tensor? mean, Tensor rstd,"
    " Tensor? weight, Tensor? bias, bool[4] output_mask, bool recompute_output=False, *,"
    " str norm, bool zero_centered_weight=False)"
    " -> (Tensor grad_input, Tensor grad_residual, Tensor grad_weight, Tensor grad_bias,"
    " Tensor output)");

}  // namespace memopt::ops
