// Dropout and a residual in front of a norm, below autograd.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "add_norm.h"
#include "checks.h"
#include "dropout.h"
#include "launch.h"
#include "rms_norm.h"

namespace memopt::ops {
namespace {

using at::Tensor;
using kernels::NormBackwardParams;
using kernels::NormForwardParams;
using kernels::cpu::Kernels;

NormOutputs forward(const NormArguments& a, const Tensor& residual, double p, double eps,
                    bool statistics, const StateArgument& state) {
  return norm_forward(a, eps, statistics, &residual, [&](NormForwardParams params) {
    const Drop drop = drawn_drop(a.input, p, state.given, state.drawn);
    params.drops = true;
    params.rule = drop.rule;
    params.state = drop.state;
    launch(
        a.op, a.input,
        [&](const Kernels& cpu) {
          leave_state(drop);
          parallel(params.rows, params.cols,
                   [&](int64_t begin, int64_t end) { cpu.norm_forward(params, begin, end); });
        },
        MEMOPT_CUDA_KERNEL(norm_forward), params);
  });
}

// Of which gradients are wanted.
struct Wanted {
  bool input;
  bool residual;
  bool weight;
  bool bias;
};

struct Gradients {
  Tensor input;
  NormGradients others;  // `input` among them is residual's
};

Gradients backward(const NormArguments& a, const NormSaved& saved, const Tensor& rng_state,
                   double p, Wanted wanted, bool recompute_output) {
  check_p(a.op, p);
  check_input(a.op, "sum", a.input);
  check_state(a.op, rng_state, "sum", a.input);
  const std::array<bool, 3> mask{wanted.residual, wanted.weight, wanted.bias};
  if (!wanted.input) return {Tensor(), add_norm_backward(a, saved, mask, recompute_output)};

  const Tensor dx = at::empty_symint(a.input.sym_sizes(), a.input.options());
  const auto run = [&](NormBackwardParams params) {
    const Drop drop = given_drop(rng_state, p);
    params.rule = drop.rule;
    params.dx_dropped = dx.mutable_data_ptr();
    params.stream_stores = exceeds_cache(a.input, params.dsum == nullptr ? 4 : 5);
    launch(
        a.op, a.input,
        [&](const Kernels& cpu) {
          parallel(params.parts, elements_per_part(params),
                   [&](int64_t begin, int64_t end) { cpu.norm_backward(params, begin, end); });
          parallel(params.cols, 2 * params.parts,
                   [&](int64_t begin, int64_t end) { cpu.norm_reduce_parts(params, begin, end); });
        },
        MEMOPT_CUDA_KERNEL(norm_backward), params);
  };
  return {dx, norm_backward(a, saved, mask, recompute_output, run, /*also=*/true)};
}

NormOutputs checked_forward(const NormArguments& a, const Tensor& residual,
                            const OptionalTensor& rng_state, double p, double eps,
                            Tensor* drawn_state) {
  check_input(a.op, "input", a.input);
  check_p(a.op, p);
  StateArgument state;
  if (drawn_state != nullptr) {
    state = state_argument(a.op, rng_state, a.input);
    *drawn_state = state.drawn;
  }
  return forward(a, residual, p, eps, /*statistics=*/drawn_state != nullptr, state);
}

std::tuple<Tensor, Tensor> dropout_add_layer_norm(const Tensor& input, const Tensor& residual,
                                                  double p, c10::SymIntArrayRef normalized_shape,
                                                  const OptionalTensor& weight,
                                                  const OptionalTensor& bias, double eps) {
  const NormOutputs out =
      checked_forward({"dropout_add_layer_norm", input, normalized_shape, weight, bias}, residual,
                      /*rng_state=*/std::nullopt, p, eps, /*drawn_state=*/nullptr);
  return {out.output, out.sum};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> _dropout_add_layer_norm_forward(
    const Tensor& input, const Tensor& residual, const OptionalTensor& rng_state, double p,
    c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight, const OptionalTensor& bias,
    double eps) {
  Tensor state;
  const NormOutputs out =
      checked_forward({"dropout_add_layer_norm", input, normalized_shape, weight, bias}, residual,
                      rng_state, p, eps, &state);
  return {out.output, out.sum, out.mean, out.rstd, state};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> _dropout_add_layer_norm_backward(
    const Tensor& grad_output, const OptionalTensor& grad_sum, const Tensor& sum,
    const Tensor& rng_state, double p, c10::SymIntArrayRef normalized_shape, const Tensor& mean,
    const Tensor& rstd, const OptionalTensor& weight, const OptionalTensor& bias,
    std::array<bool, 4> output_mask, bool recompute_output) {
  const auto [dx, grads] =
      backward({"dropout_add_layer_norm backward", sum, normalized_shape, weight, bias},
               {grad_output, mean, rstd, grad_sum}, rng_state, p,
               {output_mask[0], output_mask[1], output_mask[2], output_mask[3]}, recompute_output);
  return {dx, grads.input, grads.weight, grads.bias, grads.output};
}

NormOutputs rms_norm_forward(const Tensor& input, const Tensor& residual,
                             const OptionalTensor& rng_state, double p,
                             c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                             std::optional<double> eps, bool zero_centered_weight,
                             Tensor* drawn_state) {
  const OptionalTensor no_bias;
  return checked_forward({"dropout_add_rms_norm", input, normalized_shape, weight, no_bias,
                          rms_norm_kind(zero_centered_weight)},
                         residual, rng_state, p, eps_or_default(eps, input), drawn_state);
}

std::tuple<Tensor, Tensor> dropout_add_rms_norm(const Tensor& input, const Tensor& residual,
                                                double p, c10::SymIntArrayRef normalized_shape,
                                                const OptionalTensor& weight,
                                                std::optional<double> eps,
                                                bool zero_centered_weight) {
  const NormOutputs out =
      rms_norm_forward(input, residual, /*rng_state=*/std::nullopt, p, normalized_shape, weight,
                       eps, zero_centered_weight, /*drawn_state=*/nullptr);
  return {out.output, out.sum};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> _dropout_add_rms_norm_forward(
    const Tensor& input, const Tensor& residual, const OptionalTensor& rng_state, double p,
    c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight, std::optional<double> eps,
    bool zero_centered_weight) {
  Tensor state;
  const NormOutputs out = rms_norm_forward(input, residual, rng_state, p, normalized_shape, weight,
                                           eps, zero_centered_weight, &state);
  return {out.output, out.sum, out.rstd, state};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> _dropout_add_rms_norm_backward(
    const Tensor& grad_output, const OptionalTensor& grad_sum, const Tensor& sum,
    const Tensor& rng_state, double p, c10::SymIntArrayRef normalized_shape, const Tensor& rstd,
    const OptionalTensor& weight, std::array<bool, 3> output_mask, bool recompute_output,
    bool zero_centered_weight) {
  const OptionalTensor no_bias;
  const Tensor no_mean;
  const auto [dx, grads] =
      backward({"dropout_add_rms_norm backward", sum, normalized_shape, weight, no_bias,
                rms_norm_kind(zero_centered_weight)},
               {grad_output, no_mean, rstd, grad_sum}, rng_state, p,
               {output_mask[0], output_mask[1], output_mask[2], false}, recompute_output);
  return {dx, grads.input, grads.weight, grads.output};
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, CompositeExplicitAutograd, m) {
  m.impl("dropout_add_layer_norm", dropout_add_layer_norm);
  m.impl("_dropout_add_layer_norm_forward", _dropout_add_layer_norm_forward);
  m.impl("_dropout_add_layer_norm_backward", _dropout_add_layer_norm_backward);
  m.impl("dropout_add_rms_norm", dropout_add_rms_norm);
  m.impl("_dropout_add_rms_norm_forward", _dropout_add_rms_norm_forward);
  m.impl("_dropout_add_rms_norm_backward", _dropout_add_rms_norm_backward);
}

}  // namespace memopt::ops
