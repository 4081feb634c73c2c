// Activations below autograd. Elementwise: work on any dense layout in memory order, and the output
// takes input's strides.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <iterator>
#include <string>
#include <string_view>
#include <tuple>

#include "activation.h"
#include "checks.h"
#include "launch.h"
#include "tensors.h"

namespace memopt::ops {
namespace {

using at::Tensor;
using kernels::Activation;
using kernels::cpu::Kernels;

// tensor in the memory order of `like`: itself, or a copy.
Tensor in_order_of(const Tensor& tensor, const Tensor& like) {
  if (tensor.strides() == like.strides()) return tensor;
  return at::empty_like(like).copy_(tensor);
}

// input, or a copy without the gaps and overlaps of a sliced or expanded one. Either has the
// strides of empty_like(input), as the meta path says.
Tensor dense(const Tensor& input) {
  return input.is_non_overlapping_and_dense() ? input : at::empty_like(input).copy_(input);
}

// The name in errors.
const char* op_name(Activation activation, bool backward) {
  switch (activation) {
    case Activation::kSilu:
      return backward ? "silu backward" : "silu";
    case Activation::kRelu:
      return backward ? "relu backward" : "relu";
    case Activation::kQuickGelu:
      return backward ? "quick_gelu backward" : "quick_gelu";
    case Activation::kReluSquared:
      return backward ? "relu_squared backward" : "relu_squared";
    case Activation::kSigmoid:
      return backward ? "sigmoid backward" : "sigmoid";
    default:
      return backward ? "gelu backward" : "gelu";
  }
}

// y may be x. Both are dense, with the same strides.
void run_forward(const char* op, const Tensor& x, const Tensor& y, Activation activation) {
  const bool in_place = y.is_same(x);
  const kernels::ActivationForwardParams p{x.const_data_ptr(), y.mutable_data_ptr(),
                                           x.numel(),          scalar_type(x),
                                           {activation},       !in_place && exceeds_cache(y, 2)};
  launch(
      op, x,
      [&](const Kernels& cpu) {
        parallel_blocks(p.size,
                        [&](int64_t begin, int64_t end) { cpu.activation_forward(p, begin, end); });
      },
      MEMOPT_CUDA_KERNEL(activation_forward), p);
}

Tensor forward(const Tensor& input, Activation activation) {
  const char* op = op_name(activation, /*backward=*/false);
  check_input(op, "input", input);
  if (input.is_meta()) return at::empty_like(input);
  const Tensor x = dense(input);
  const Tensor y = at::empty_like(x);
  run_forward(op, x, y, activation);
  return y;
}

Tensor gelu(const Tensor& input, std::string_view approximate) {
  return forward(input, parse_approximate("gelu", approximate));
}

template <Activation kActivation>
Tensor activation(const Tensor& input) {
  return forward(input, kActivation);
}

Tensor _activation_forward(const Tensor& input, std::string_view name) {
  return forward(input, parse_activation("activation", name));
}

void _activation_forward_(const Tensor& input, std::string_view name) {
  const Activation activation = parse_activation("activation", name);
  const char* op = op_name(activation, /*backward=*/false);
  check_input(op, "input", input);
  check_contiguous(op, "input", input);
  if (!input.is_meta()) run_forward(op, input, input, activation);
}

// All dense, with the same strides. dx may be dy, y undefined or x.
void run_backward(const char* op, const Tensor& dy, const Tensor& x, const Tensor& dx,
                  const Tensor& y, Activation activation) {
  const bool in_place = dx.is_same(dy);
  const kernels::ActivationBackwardParams p{dy.const_data_ptr(),
                                            x.const_data_ptr(),
                                            dx.mutable_data_ptr(),
                                            mutable_data(y),
                                            x.numel(),
                                            scalar_type(x),
                                            {activation},
                                            !in_place && exceeds_cache(dx, 3)};
  launch(
      op, x,
      [&](const Kernels& cpu) {
        parallel_blocks(
            p.size, [&](int64_t begin, int64_t end) { cpu.activation_backward(p, begin, end); });
      },
      MEMOPT_CUDA_KERNEL(activation_backward), p);
}

std::tuple<Tensor, Tensor> _activation_backward(const Tensor& grad_output, const Tensor& input,
                                                std::string_view name, bool recompute_output) {
  const Activation activation = parse_activation("activation backward", name);
  const char* op = op_name(activation, /*backward=*/true);
  check_input(op, "input", input);
  check_like_input(op, "grad_output", grad_output, input);
  const Tensor x = input.is_meta() ? input : dense(input);
  const Tensor dx = at::empty_like(x);
  const Tensor y = recompute_output ? at::empty_like(x) : Tensor();
  if (!input.is_meta()) run_backward(op, in_order_of(grad_output, x), x, dx, y, activation);
  return {dx, y};
}

void _activation_backward_(const Tensor& grad_output, const Tensor& input, std::string_view name,
                           const std::optional<Tensor>& output) {
  const Activation activation = parse_activation("activation backward", name);
  const char* op = op_name(activation, /*backward=*/true);
  const Tensor y = output.value_or(Tensor());
  check_input(op, "input", input);
  check_contiguous(op, "input", input);
  check_like_input(op, "grad_output", grad_output, input);
  check_contiguous(op, "grad_output", grad_output);
  if (y.defined()) {
    check_like_input(op, "output", y, input);
    check_contiguous(op, "output", y);
  }
  if (!input.is_meta()) run_backward(op, grad_output, input, grad_output, y, activation);
}

}  // namespace

Activation parse_activation(const char* op, std::string_view name) {
  const kernels::NamedActivation* found = kernels::find_activation(name);
  if (found != nullptr) return found->kind;
  std::string names;
  for (const kernels::NamedActivation& known : kernels::kActivations) {
    const bool last = &known == std::end(kernels::kActivations) - 1;
    names += (names.empty() ? "'" : last ? " or '" : ", '") + std::string(known.name) + "'";
  }
  TORCH_CHECK(false, op, ": activation must be ", names, ", got '", name, "'");
}

// One function serves the CPU, CUDA and meta; every other backend gets check_input's error.
TORCH_LIBRARY_IMPL(memopt, CompositeExplicitAutograd, m) {
  m.impl("gelu", gelu);
  m.impl("silu", activation<Activation::kSilu>);
  m.impl("relu", activation<Activation::kRelu>);
  m.impl("quick_gelu", activation<Activation::kQuickGelu>);
  m.impl("relu_squared", activation<Activation::kReluSquared>);
  m.impl("sigmoid", activation<Activation::kSigmoid>);
  m.impl("_activation_forward", _activation_forward);
  m.impl("_activation_forward_", _activation_forward_);
  m.impl("_activation_backward", _activation_backward);
  m.impl("_activation_backward_", _activation_backward_);
}

}  // namespace memopt::ops
