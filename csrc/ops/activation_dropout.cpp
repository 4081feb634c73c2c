// An activation with dropout behind it, below autograd. Elements are numbered as in the contiguous
// tensor, whatever their order in memory.
#include <ATen/core/Tensor.h>

#include <string_view>
#include <tuple>

#include "activation.h"
#include "checks.h"
#include "declare.h"
#include "dropout.h"
#include "launch.h"
#include "layout.h"
#include "private_ops.h"
#include "tensors.h"

namespace memopt::ops {
namespace {

using kernels::ActivationSpec;
using kernels::cpu::Kernels;

constexpr char kForward[] = "activation_dropout", kBackward[] = "activation_dropout backward";

ActivationSpec check_activation_dropout(const char* op, const Tensor& input, double p,
                                        std::string_view activation, Scalar scalar) {
  check_input(op, "input", input);
  check_p(op, p);
  return parse_activation(op, activation, scalar);
}

}  // namespace

Results2 _activation_dropout_forward(const Tensor& input, const OptionalTensor& rng_state, double p,
                                     std::string_view name, Scalar scalar, bool for_backward) {
  const ActivationSpec activation = check_activation_dropout(kForward, input, p, name, scalar);
  const StateArgument state = state_argument(kForward, rng_state, input, for_backward);
  const Tensor result = empty_elementwise(input);
  if (input.is_meta()) return {result, state.drawn};
  const Tensor x = input.contiguous(), y = contiguous_buffer(result);
  const Drop drop = drawn_drop(x, p, state.given, state.drawn);
  const kernels::ActivationForwardParams params{
      x.const_data_ptr(),  y.mutable_data_ptr(), x.numel(), scalar_type(x), activation,
      exceeds_cache(y, 2), /*drops=*/true,       drop.rule, drop.state};
  launch(
      kForward, x,
      [&](const Kernels& cpu) {
        leave_state(drop);
        parallel_blocks(x.numel(), [&](int64_t begin, int64_t end) {
          cpu.activation_forward(params, begin, end);
        });
      },
      MEMOPT_CUDA_KERNEL(activation_forward), params);
  deliver(y, result);
  return {result, state.drawn};
}

Results2 _activation_dropout_backward(const Tensor& grad_output, const Tensor& input,
                                      const Tensor& rng_state, double p, std::string_view name,
                                      Scalar scalar, bool recompute_output) {
  const ActivationSpec activation = check_activation_dropout(kBackward, input, p, name, scalar);
  check_like_input(kBackward, "grad_output", grad_output, input);
  check_state(kBackward, rng_state, "input", input);
  const Tensor grad_input = empty_activation_gradient(activation, grad_output, input);
  const Tensor output = recompute_output ? empty_elementwise(input) : Tensor();
  if (input.is_meta()) return {grad_input, output};
  const Tensor x = input.contiguous(), dy = grad_output.contiguous();
  const Tensor dx = contiguous_buffer(grad_input), y = contiguous_buffer(output);
  const Drop drop = given_drop(rng_state, p);
  const kernels::ActivationBackwardParams params{
      dy.const_data_ptr(), x.const_data_ptr(), dx.mutable_data_ptr(), mutable_data(y), x.numel(),
      scalar_type(x),      activation,         exceeds_cache(dx, 3),  /*drops=*/true,  drop.rule};
  launch(
      kBackward, x,
      [&](const Kernels& cpu) {
        parallel_blocks(x.numel(), [&](int64_t begin, int64_t end) {
          cpu.activation_backward(params, begin, end);
        });
      },
      MEMOPT_CUDA_KERNEL(activation_backward), params);
  deliver(dx, grad_input);
  deliver(y, output);
  return {grad_input, output};
}

// One function serves the CPU, CUDA and meta; every other backend gets check_input's error.
MEMOPT_DECLARE_PRIVATE(
    _activation_dropout_forward, kDrawsRandomNumbers,
    "_activation_dropout_forward(Tensor input, Tensor? rng_state, float p, *, str activation,"
    " float? activation_scalar=None, bool for_backward=True)"
    " -> (Tensor output, Tensor rng_state)");
MEMOPT_DECLARE_PRIVATE(
    _activation_dropout_backward, {},
    "_activation_dropout_backward(Tensor grad_output, Tensor input, Tensor rng_state, float p,"
    " *, str activation, float? activation_scalar=None, bool recompute_output=False)"
    " -> (Tensor grad_input, Tensor output)");

}  // namespace memopt::ops
