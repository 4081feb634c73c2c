// Dropout below autograd. Elements are numbered as in the contiguous tensor, and results are
// contiguous. Forward and backward are one kernel; they differ in where it finds its state.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <tuple>

#include "../kernels/dropout.h"
#include "checks.h"
#include "launch.h"
#include "random.h"
#include "tensors.h"

namespace memopt::ops {
namespace {

using at::Tensor;
using kernels::DropoutParams;
using kernels::DropoutRule;
using kernels::cpu::Kernels;

constexpr int64_t kBlock = 4096;  // elements; a multiple of every vector and cache line

void check_p(const char* op, double p) {
  // Not so for NaN.
  TORCH_CHECK_VALUE(p >= 0.0 && p <= 1.0, op, ": p must be between 0 and 1, got ", p);
}

void check_state(const char* op, const Tensor& state, const Tensor& like) {
  TORCH_CHECK(state.defined() && state.layout() == at::kStrided &&
                  state.scalar_type() == at::kLong && state.dim() == 1 &&
                  TORCH_GUARD_OR_TRUE(state.sym_size(0).sym_eq(2)),
              op, ": rng_state must be an int64 tensor [seed, offset]");
  TORCH_CHECK(state.device() == like.device(), op, ": rng_state must be on grad_output's device ",
              like.device(), ", got ", state.device());
}

Tensor new_state(const Tensor& input) {
  return at::empty({2}, input.options().dtype(at::kLong));
}

Tensor empty_output(const Tensor& input) {
  return at::empty_like(input, input.options(), at::MemoryFormat::Contiguous);
}

// input times what `rule` says. `state`, undefined if nobody wants it, gets the rule's state.
Tensor apply(const char* op, const Tensor& input, const DropoutRule& rule, const Tensor& state) {
  const Tensor x = input.contiguous();
  const Tensor y = empty_output(x);
  DropoutParams p{x.const_data_ptr(), y.mutable_data_ptr(), rule, nullptr, x.numel(),
                  scalar_type(x),     exceeds_cache(y, 2)};
  if (state.defined()) p.state = state.mutable_data_ptr<int64_t>();
  launch(
      op, x,
      [&](const Kernels& cpu) {
        if (p.state != nullptr) {
          p.state[0] = static_cast<int64_t>(rule.seed);
          p.state[1] = static_cast<int64_t>(rule.offset);
        }
        parallel(kernels::ceil_div(p.size, kBlock), kBlock, [&](int64_t begin, int64_t end) {
          cpu.dropout(p, begin * kBlock, std::min(end * kBlock, p.size));
        });
      },
      MEMOPT_CUDA_KERNEL(dropout), p);
  return y;
}

void check(const char* op, const Tensor& input, double p) {
  check_input(op, "input", input);
  check_p(op, p);
}

Tensor draw_and_apply(const Tensor& input, double p, const Tensor& state) {
  const char* op = "dropout";
  const RandomState random = draw_random_state(input);
  return apply(op, input, kernels::dropout_rule(p, nullptr, random.seed, random.offset), state);
}

Tensor dropout(const Tensor& input, double p) {
  check("dropout", input, p);
  return input.is_meta() ? empty_output(input) : draw_and_apply(input, p, Tensor());
}

std::tuple<Tensor, Tensor> _dropout_forward(const Tensor& input, double p) {
  check("dropout", input, p);
  const Tensor state = new_state(input);
  return {input.is_meta() ? empty_output(input) : draw_and_apply(input, p, state), state};
}

Tensor _dropout_backward(const Tensor& grad_output, const Tensor& rng_state, double p) {
  const char* op = "dropout backward";
  check_input(op, "grad_output", grad_output);
  check_p(op, p);
  check_state(op, rng_state, grad_output);
  if (grad_output.is_meta()) return empty_output(grad_output);
  const Tensor state = rng_state.contiguous();
  return apply(op, grad_output,
               kernels::dropout_rule(p, state.const_data_ptr<int64_t>(), /*seed=*/0, /*offset=*/0),
               Tensor());
}

}  // namespace

// One function serves the CPU, CUDA and meta; every other backend gets check_input's error.
TORCH_LIBRARY_IMPL(memopt, CompositeExplicitAutograd, m) {
  m.impl("dropout", dropout);
  m.impl("_dropout_forward", _dropout_forward);
  m.impl("_dropout_backward", _dropout_backward);
}

}  // namespace memopt::ops
