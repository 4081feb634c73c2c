// The norms below autograd: LayerNorm and RMSNorm, with what stands in front of them and behind
// them (kernels/norm.h).
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <array>
#include <limits>
#include <string_view>
#include <tuple>

#include "../kernels/norm.h"
#include "activation.h"
#include "checks.h"
#include "dropout.h"
#include "launch.h"
#include "tensors.h"

namespace memopt::ops {
namespace {

using at::Tensor;
using kernels::NormBackwardParams;
using kernels::NormForwardParams;
using kernels::NormKind;
using kernels::cpu::Kernels;
using OptionalTensor = std::optional<Tensor>;

struct Norm {
  NormKind kind;
  bool zero_centered;
  kernels::ActivationSpec activation;
  const char* op;  // in errors: what a user calls

  bool is_layer_norm() const { return kind == NormKind::kLayerNorm; }
};

// The name of the public op, as in errors.
const char* op_name(bool rms, bool activates, bool adds, bool drops, bool backward) {
  if (activates) return backward ? "layer_norm_gelu backward" : "layer_norm_gelu";
  if (drops && rms) return backward ? "dropout_add_rms_norm backward" : "dropout_add_rms_norm";
  if (drops) return backward ? "dropout_add_layer_norm backward" : "dropout_add_layer_norm";
  if (adds && rms) return backward ? "add_rms_norm backward" : "add_rms_norm";
  if (adds) return backward ? "add_layer_norm backward" : "add_layer_norm";
  if (rms) return backward ? "rms_norm backward" : "rms_norm";
  return backward ? "layer_norm backward" : "layer_norm";
}

struct InFront {
  bool adds = false;
  bool drops = false;
};

Norm parse(std::string_view norm, bool zero_centered, std::optional<std::string_view> activation,
           InFront front, bool backward) {
  TORCH_CHECK(norm == "layer_norm" || norm == "rms_norm",
              "norm must be 'layer_norm' or 'rms_norm', got '", norm, "'");
  const bool rms = norm == "rms_norm";
  const char* op = op_name(rms, activation.has_value(), front.adds, front.drops, backward);
  Norm parsed{rms ? NormKind::kRmsNorm : NormKind::kLayerNorm, zero_centered,
              {kernels::Activation::kIdentity, 0.0}, op};
  if (activation.has_value()) {
    parsed.activation = parse_activation(op, *activation, std::nullopt);
    TORCH_CHECK(kernels::is_norm(parsed.kind, parsed.activation.kind, front.adds), op,
                ": activation behind a ", norm, " must be 'gelu' or 'gelu_tanh' behind a "
                "layer_norm without a residual, got '", *activation, "'");
  }
  return parsed;
}

// v, a matrix whose rows are normalised, and the parameters.
struct Arguments {
  const Tensor& v;
  int64_t normalized_dims;
  const OptionalTensor& weight;
  const OptionalTensor& bias;

  c10::SymIntArrayRef row() const {
    return v.sym_sizes().slice(static_cast<size_t>(v.dim() - normalized_dims));
  }
};

void check(const Norm& norm, const Arguments& a) {
  check_input(norm.op, "input", a.v);
  TORCH_CHECK(a.normalized_dims >= 1 && a.normalized_dims <= a.v.dim(), norm.op,
              ": normalized_shape must be some of input's last dimensions, got ",
              a.normalized_dims, " of ", a.v.dim());
  check_parameters(norm.op, a.v, a.row(), a.weight, a.bias);
}

// Input's leading dimensions, then a one for each normalised one: as torch.native_layer_norm shapes
// them.
c10::SymDimVector statistics_shape(const Arguments& a) {
  c10::SymDimVector shape(a.v.sym_sizes().begin(), a.v.sym_sizes().end());
  std::fill(shape.end() - a.normalized_dims, shape.end(), c10::SymInt(1));
  return shape;
}

Tensor empty_statistic(const Arguments& a, bool wanted) {
  if (!wanted) return Tensor();
  return at::empty_symint(statistics_shape(a), a.v.options().dtype(accumulate_type(a.v)));
}

Tensor empty_like_v(const Arguments& a, bool wanted) {
  return wanted ? at::empty_symint(a.v.sym_sizes(), a.v.options()) : Tensor();
}

// A parameter, contiguous, or null where there is none. One whose storage was freed (sharding does
// that) must not pass for none.
const void* parameter_data(const Norm& norm, const char* name, const Tensor& parameter) {
  const void* data = const_data(parameter);
  TORCH_CHECK(!parameter.defined() || data != nullptr, norm.op, ": ", name,
              " must be in memory, got one whose storage was freed");
  return data;
}

kernels::ScalarType parameter_type(const Tensor& weight, const Tensor& bias, const Tensor& v) {
  return scalar_type(weight.defined() ? weight : bias.defined() ? bias : v);
}

// PyTorch's defaults: 1e-5 for layer_norm; for rms_norm the distance from 1 to the next number of
// the type that is computed in.
double checked_eps(const Norm& norm, std::optional<double> eps, const Tensor& v) {
  if (!eps.has_value() && norm.is_layer_norm()) return 1e-5;
  if (!eps.has_value()) {
    return v.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                          : std::numeric_limits<float>::epsilon();
  }
  check_eps(norm.op, *eps);
  return *eps;
}

struct Outputs {
  Tensor output;
  Tensor sum;   // undefined without a residual
  Tensor mean;  // these undefined without a backward; the mean for RMSNorm
  Tensor rstd;
};

// `drop` draws and says what is dropped; null: nothing. Not called for meta tensors.
Outputs forward(const Norm& norm, const Arguments& a, const OptionalTensor& residual,
                std::optional<double> eps_or_default, bool for_backward,
                c10::function_ref<Drop()>* draw) {
  const char* op = norm.op;
  check(norm, a);
  const double eps = checked_eps(norm, eps_or_default, a.v);
  const bool adds = residual.has_value() && residual->defined();
  if (adds) check_like_input(op, "residual", *residual, a.v);
  const Outputs out{empty_like_v(a, true), empty_like_v(a, adds),
                    empty_statistic(a, for_backward && norm.is_layer_norm()),
                    empty_statistic(a, for_backward)};
  if (a.v.is_meta()) return out;

  const int64_t cols = c10::multiply_integers(a.v.sizes().slice(a.v.dim() - a.normalized_dims));
  const int64_t rows = a.v.numel() / cols;
  const Rows x = as_rows(a.v, rows, cols);
  const Rows added = adds ? as_rows(*residual, rows, cols) : Rows{Tensor(), 0};
  const Tensor gamma = contiguous_parameter(a.weight), beta = contiguous_parameter(a.bias);
  NormForwardParams p{};
  p.x = x.data();
  p.gamma = parameter_data(norm, "weight", gamma);
  p.beta = parameter_data(norm, "bias", beta);
  p.y = out.output.mutable_data_ptr();
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
  p.sum = mutable_data(out.sum);
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
  return out;
}

struct Saved {
  const Tensor& grad_output;
  const OptionalTensor& grad_sum;  // of the sum with a residual
  const OptionalTensor& mean;      // none for RMSNorm
  const Tensor& rstd;
};

// What is wanted, and where it goes. Undefined where it is not wanted.
struct Gradients {
  Tensor v;       // may be grad_output, contiguous
  Tensor weight;
  Tensor bias;
  Tensor output;  // re-emitted
  Tensor dropped;  // v's, through dropout

  bool any() const {
    return v.defined() || weight.defined() || bias.defined() || output.defined() ||
           dropped.defined();
  }
};

void check_statistics(const Norm& norm, const Arguments& a, const char* name,
                      const Tensor& statistics) {
  TORCH_CHECK(statistics.defined(), norm.op, ": ", name, " must be a tensor, got None");
  TORCH_CHECK(statistics.scalar_type() == accumulate_type(a.v) &&
                  statistics.device() == a.v.device() && statistics.is_contiguous(),
              norm.op, ": ", name, " must be a contiguous ", accumulate_type(a.v), " tensor on ",
              a.v.device(), ", got ", statistics.scalar_type(), " on ", statistics.device());
  const c10::SymDimVector shape = statistics_shape(a);
  TORCH_CHECK(statistics.sym_sizes().equals(shape), norm.op, ": ", name, " must have shape ",
              shape, ", got ", statistics.sym_sizes());
}

void check_backward(const Norm& norm, const Arguments& a, const Saved& saved) {
  check(norm, a);
  check_like_input(norm.op, "grad_output", saved.grad_output, a.v);
  if (norm.is_layer_norm()) check_statistics(norm, a, "mean", saved.mean.value_or(Tensor()));
  check_statistics(norm, a, "rstd", saved.rstd);
  if (saved.grad_sum.has_value() && saved.grad_sum->defined()) {
    check_like_input(norm.op, "grad_sum", *saved.grad_sum, a.v);
  }
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

void backward(const Norm& norm, const Arguments& a, const Saved& saved, const Gradients& to,
              const kernels::DropoutRule& rule = {}) {
  if (a.v.is_meta() || !to.any()) return;
  const bool in_place = to.v.is_same(saved.grad_output);
  const bool has_sum = saved.grad_sum.has_value() && saved.grad_sum->defined();
  const int64_t cols = c10::multiply_integers(a.v.sizes().slice(a.v.dim() - a.normalized_dims));
  const int64_t rows = a.v.numel() / cols;
  const Rows x = as_rows(a.v, rows, cols);
  const Rows dy = as_rows(saved.grad_output, rows, cols);
  const Rows dsum = has_sum ? as_rows(*saved.grad_sum, rows, cols) : Rows{Tensor(), 0};
  const Tensor gamma = contiguous_parameter(a.weight), beta = contiguous_parameter(a.bias);
  NormBackwardParams p{};
  p.dy = dy.data();
  p.x = x.data();
  p.gamma = parameter_data(norm, "weight", gamma);
  p.beta = parameter_data(norm, "bias", beta);
  p.mean = const_data(saved.mean.value_or(Tensor()));
  p.rstd = saved.rstd.const_data_ptr();
  p.dx = mutable_data(to.v);
  p.y = mutable_data(to.output);
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
  p.dx_dropped = mutable_data(to.dropped);
  p.rule = rule;
  p.parts = part_count(norm.op, a.v, rows, cols);
  Tensor partials;
  if (to.weight.defined() || to.bias.defined()) {
    const int64_t sums = norm.is_layer_norm() ? 2 : 1;
    partials = at::empty({p.parts, sums, cols}, a.v.options().dtype(accumulate_type(a.v)));
    p.partials = partials.mutable_data_ptr();
  }
  launch(
      norm.op, a.v,
      [&](const Kernels& cpu) {
        parallel(p.parts, kernels::cpu::norm_rows_per_part(rows) * cols,
                 [&](int64_t begin, int64_t end) { cpu.norm_backward(p, begin, end); });
        parallel(cols, 2 * p.parts,
                 [&](int64_t begin, int64_t end) { cpu.norm_reduce_parts(p, begin, end); });
      },
      MEMOPT_CUDA_KERNEL(norm_backward), p);
}

using Activation = std::optional<std::string_view>;
using Results4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Results5 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

bool is_given(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

Results4 _norm_forward(const Tensor& input, const OptionalTensor& residual,
                       int64_t normalized_dims, const OptionalTensor& weight,
                       const OptionalTensor& bias, std::optional<double> eps,
                       std::string_view kind, bool zero_centered_weight, Activation activation,
                       bool for_backward) {
  const Norm norm = parse(kind, zero_centered_weight, activation, {is_given(residual)},
                          /*backward=*/false);
  const Outputs out = forward(norm, {input, normalized_dims, weight, bias}, residual, eps,
                              for_backward, /*draw=*/nullptr);
  return {out.output, out.sum, out.mean, out.rstd};
}

Results4 _norm_backward(const Tensor& grad_output, const OptionalTensor& grad_sum, const Tensor& x,
                        int64_t normalized_dims, const OptionalTensor& mean, const Tensor& rstd,
                        const OptionalTensor& weight, const OptionalTensor& bias,
                        std::array<bool, 3> output_mask, bool recompute_output,
                        std::string_view kind, bool zero_centered_weight, Activation activation) {
  const Norm norm = parse(kind, zero_centered_weight, activation, {is_given(grad_sum)},
                          /*backward=*/true);
  const Arguments a{x, normalized_dims, weight, bias};
  const Saved saved{grad_output, grad_sum, mean, rstd};
  check_backward(norm, a, saved);
  const Gradients to{empty_like_v(a, output_mask[0]),
                     empty_parameter_gradient(output_mask[1], weight),
                     empty_parameter_gradient(output_mask[2], bias),
                     empty_like_v(a, recompute_output), Tensor()};
  backward(norm, a, saved, to);
  return {to.v, to.weight, to.bias, to.output};
}

std::tuple<Tensor, Tensor, Tensor> _norm_backward_(
    const Tensor& grad_output, const Tensor& x, int64_t normalized_dims,
    const OptionalTensor& mean, const Tensor& rstd, const OptionalTensor& weight,
    const OptionalTensor& bias, std::array<bool, 2> output_mask, bool recompute_output,
    std::string_view kind, bool zero_centered_weight, Activation activation) {
  const Norm norm = parse(kind, zero_centered_weight, activation, {}, /*backward=*/true);
  const Arguments a{x, normalized_dims, weight, bias};
  const OptionalTensor no_grad_sum;
  const Saved saved{grad_output, no_grad_sum, mean, rstd};
  check_backward(norm, a, saved);
  check_contiguous(norm.op, "grad_output", grad_output);
  const Gradients to{grad_output, empty_parameter_gradient(output_mask[0], weight),
                     empty_parameter_gradient(output_mask[1], bias),
                     empty_like_v(a, recompute_output), Tensor()};
  backward(norm, a, saved, to);
  return {to.weight, to.bias, to.output};
}

Results5 _dropout_add_norm_forward(const Tensor& input, const Tensor& residual,
                                   const OptionalTensor& rng_state, double p,
                                   int64_t normalized_dims, const OptionalTensor& weight,
                                   const OptionalTensor& bias, std::optional<double> eps,
                                   std::string_view kind, bool zero_centered_weight,
                                   bool for_backward) {
  const Norm norm = parse(kind, zero_centered_weight, std::nullopt, {true, true},
                          /*backward=*/false);
  check_input(norm.op, "input", input);
  check_p(norm.op, p);
  const StateArgument state = state_argument(norm.op, rng_state, input, for_backward);
  const auto draw = [&] { return drawn_drop(input, p, state.given, state.drawn); };
  c10::function_ref<Drop()> drop(draw);
  const Outputs out =
      forward(norm, {input, normalized_dims, weight, bias}, residual, eps, for_backward, &drop);
  return {out.output, out.sum, out.mean, out.rstd, state.drawn};
}

Results5 _dropout_add_norm_backward(const Tensor& grad_output, const OptionalTensor& grad_sum,
                                    const Tensor& sum, const Tensor& rng_state, double p,
                                    int64_t normalized_dims, const OptionalTensor& mean,
                                    const Tensor& rstd, const OptionalTensor& weight,
                                    const OptionalTensor& bias, std::array<bool, 4> output_mask,
                                    bool recompute_output, std::string_view kind,
                                    bool zero_centered_weight) {
  const Norm norm = parse(kind, zero_centered_weight, std::nullopt, {true, true},
                          /*backward=*/true);
  check_p(norm.op, p);
  check_input(norm.op, "sum", sum);
  check_state(norm.op, rng_state, "sum", sum);
  const Arguments a{sum, normalized_dims, weight, bias};
  const Saved saved{grad_output, grad_sum, mean, rstd};
  check_backward(norm, a, saved);
  const Gradients to{empty_like_v(a, output_mask[1]),
                     empty_parameter_gradient(output_mask[2], weight),
                     empty_parameter_gradient(output_mask[3], bias),
                     empty_like_v(a, recompute_output), empty_like_v(a, output_mask[0])};
  Drop drop{};
  if (to.dropped.defined() && !sum.is_meta()) drop = given_drop(rng_state, p);
  backward(norm, a, saved, to, drop.rule);
  return {to.dropped, to.v, to.weight, to.bias, to.output};
}

}  // namespace

// One function serves the CPU, CUDA and meta; every other backend gets check_input's error.
TORCH_LIBRARY_IMPL(memopt, CompositeExplicitAutograd, m) {
  m.impl("_norm_forward", _norm_forward);
  m.impl("_norm_backward", _norm_backward);
  m.impl("_norm_backward_", _norm_backward_);
  m.impl("_dropout_add_norm_forward", _dropout_add_norm_forward);
  m.impl("_dropout_add_norm_backward", _dropout_add_norm_backward);
}

}  // namespace memopt::ops
