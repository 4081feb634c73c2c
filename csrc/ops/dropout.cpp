// Dropout below autograd. Elements are numbered as in the contiguous tensor, whatever their order
// in memory. Forward and backward are one kernel; they differ in where it finds its state.
#include "dropout.h"

#include <ATen/ops/empty.h>

#include <tuple>

#include "checks.h"
#include "declare.h"
#include "launch.h"
#include "layout.h"
#include "private_ops.h"
#include "random.h"
#include "tensors.h"

namespace memopt::ops {

using kernels::DropoutParams;
using kernels::cpu::Kernels;

void check_p(const char* op, double p) {
  // False for NaN.
  TORCH_CHECK_VALUE(p >= 0.0 && p <= 1.0, op, ": p must be between 0 and 1, got ", p);
}

void check_state(const char* op, const Tensor& state, const char* like_name, const Tensor& like) {
  TORCH_CHECK(state.defined() && state.layout() == at::kStrided &&
                  state.scalar_type() == at::kLong && state.dim() == 1 &&
                  TORCH_GUARD_OR_TRUE(state.sym_size(0).sym_eq(2)),
              op, ": rng_state must be an int64 tensor [seed, offset]");
  TORCH_CHECK(state.device() == like.device(), op, ": rng_state must be on ", like_name,
              "'s device ", like.device(), ", got ", state.device());
}

Tensor new_state(const Tensor& input) {
  return at::empty({2}, input.options().dtype(at::kLong));
}

Drop given_drop(const Tensor& state, double p) {
  const Tensor source = state.contiguous();
  const int64_t* saved = source.const_data_ptr<int64_t>();
  return {kernels::dropout_rule(p, saved, /*seed=*/0, /*offset=*/0), nullptr, source};
}

Drop drawn_drop(const Tensor& input, double p, const Tensor& given, const Tensor& state) {
  if (given.defined()) return given_drop(given, p);
  if (is_captured(input)) {
    const Tensor drawn = draw_random_state_on_device(input);
    if (state.defined()) state.copy_(drawn);
    return given_drop(drawn, p);
  }
  const RandomState random = draw_random_state(input);
  return {kernels::dropout_rule(p, nullptr, random.seed, random.offset),
          state.defined() ? state.mutable_data_ptr<int64_t>() : nullptr, Tensor()};
}

StateArgument state_argument(const char* op, const OptionalTensor& rng_state, const Tensor& input,
                             bool for_backward) {
  if (!rng_state.has_value() || !rng_state->defined()) {
    return {Tensor(), for_backward ? new_state(input) : Tensor()};
  }
  check_state(op, *rng_state, "input", input);
  return {*rng_state, Tensor()};
}

namespace {

// `result`: input times what `drop` says.
void apply(const char* op, const Tensor& input, const Drop& drop, const Tensor& result) {
  const Tensor x = input.contiguous(), y = contiguous_buffer(result);
  const DropoutParams p{x.const_data_ptr(), y.mutable_data_ptr(), drop.rule,          drop.state,
                        x.numel(),          scalar_type(x),       exceeds_cache(y, 2)};
  launch(
      op, x,
      [&](const Kernels& cpu) {
        leave_state(drop);
        parallel_blocks(p.size, [&](int64_t begin, int64_t end) { cpu.dropout(p, begin, end); });
      },
      MEMOPT_CUDA_KERNEL(dropout), p);
  deliver(y, result);
}

void check(const char* op, const Tensor& input, double p) {
  check_input(op, "input", input);
  check_p(op, p);
}

}  // namespace

Results2 _dropout_forward(const Tensor& input, double p, bool for_backward) {
  check("dropout", input, p);
  const Tensor state = for_backward ? new_state(input) : Tensor();
  const Tensor output = empty_elementwise(input);
  if (!input.is_meta()) {
    apply("dropout", input, drawn_drop(input, p, /*given=*/Tensor(), state), output);
  }
  return {output, state};
}

Tensor _dropout_backward(const Tensor& grad_output, const Tensor& rng_state, double p) {
  const char* op = "dropout backward";
  check_input(op, "grad_output", grad_output);
  check_p(op, p);
  check_state(op, rng_state, "grad_output", grad_output);
  const Tensor grad_input = empty_elementwise(grad_output);
  if (!grad_output.is_meta()) apply(op, grad_output, given_drop(rng_state, p), grad_input);
  return grad_input;
}

// One function serves the CPU, CUDA and meta; every other backend gets check_input's error.
MEMOPT_DECLARE_PRIVATE(_dropout_forward, kDrawsRandomNumbers,
                       "_dropout_forward(Tensor input, float p, *, bool for_backward=True)"
                       " -> (Tensor output, Tensor rng_state)");
MEMOPT_DECLARE_PRIVATE(
    _dropout_backward, {},
    "_dropout_backward(Tensor grad_output, Tensor rng_state, float p) -> Tensor grad_input");

}  // namespace memopt::ops
