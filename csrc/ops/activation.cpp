// Activations below autograd. Elementwise: work on any dense layout in memory order, and the output
// takes input's strides.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cmath>
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
using kernels::ActivationSpec;
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

// The name in errors: the activation's, as a user calls it.
std::string op_name(std::string_view activation, bool backward) {
  const std::string name(activation == "gelu_tanh" ? "gelu" : activation);
  return backward ? name + " backward" : name;
}

// y may be x. Both are dense, with the same strides.
void run_forward(const char* op, const Tensor& x, const Tensor& y,
                 const ActivationSpec& activation) {
  const bool in_place = y.is_same(x);
  const kernels::ActivationForwardParams p{x.const_data_ptr(), y.mutable_data_ptr(),
                                           x.numel(),          scalar_type(x),
                                           activation,         !in_place && exceeds_cache(y, 2)};
  launch(
      op, x,
      [&](const Kernels& cpu) {
        parallel_blocks(p.size,
                        [&](int64_t begin, int64_t end) { cpu.activation_forward(p, begin, end); });
      },
      MEMOPT_CUDA_KERNEL(activation_forward), p);
}

using Scalar = std::optional<double>;

Tensor _activation_forward(const Tensor& input, std::string_view name, Scalar scalar) {
  const ActivationSpec activation = parse_activation("activation", name, scalar);
  const std::string name_in_errors = op_name(name, /*backward=*/false);
  const char* op = name_in_errors.c_str();
  check_input(op, "input", input);
  if (input.is_meta()) return at::empty_like(input);
  const Tensor x = dense(input);
  const Tensor y = at::empty_like(x);
  run_forward(op, x, y, activation);
  return y;
}

void _activation_forward_(const Tensor& input, std::string_view name, Scalar scalar) {
  const ActivationSpec activation = parse_activation("activation", name, scalar);
  const std::string name_in_errors = op_name(name, /*backward=*/false);
  const char* op = name_in_errors.c_str();
  check_input(op, "input", input);
  check_contiguous(op, "input", input);
  if (!input.is_meta()) run_forward(op, input, input, activation);
}

// All dense, with the same strides. dx may be dy, y undefined or x.
void run_backward(const char* op, const Tensor& dy, const Tensor& x, const Tensor& dx,
                  const Tensor& y, const ActivationSpec& activation) {
  const bool in_place = dx.is_same(dy);
  const kernels::ActivationBackwardParams p{dy.const_data_ptr(),
                                            x.const_data_ptr(),
                                            dx.mutable_data_ptr(),
                                            mutable_data(y),
                                            x.numel(),
                                            scalar_type(x),
                                            activation,
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
                                                std::string_view name, Scalar scalar,
                                                bool recompute_output) {
  const ActivationSpec activation = parse_activation("activation backward", name, scalar);
  const std::string name_in_errors = op_name(name, /*backward=*/true);
  const char* op = name_in_errors.c_str();
  check_input(op, "input", input);
  check_like_input(op, "grad_output", grad_output, input);
  const Tensor x = input.is_meta() ? input : dense(input);
  const Tensor dx = at::empty_like(x);
  const Tensor y = recompute_output ? at::empty_like(x) : Tensor();
  if (!input.is_meta()) run_backward(op, in_order_of(grad_output, x), x, dx, y, activation);
  return {dx, y};
}

void _activation_backward_(const Tensor& grad_output, const Tensor& input, std::string_view name,
                           Scalar scalar, const std::optional<Tensor>& output) {
  const ActivationSpec activation = parse_activation("activation backward", name, scalar);
  const std::string name_in_errors = op_name(name, /*backward=*/true);
  const char* op = name_in_errors.c_str();
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

ActivationSpec parse_activation(const char* op, std::string_view name, Scalar scalar) {
  const kernels::NamedActivation* found = kernels::find_activation(name);
  if (found == nullptr) {
    std::string names;
    for (const kernels::NamedActivation& known : kernels::kActivations) {
      names += (names.empty() ? "'" : ", '") + std::string(known.name) + "'";
    }
    TORCH_CHECK(false, op, ": activation must be one of ", names, ", got '", name, "'");
  }
  TORCH_CHECK(found->takes_scalar || !scalar.has_value(), op,
              ": activation_scalar must be None for '", name, "', which takes none, got ", *scalar);
  TORCH_CHECK(!found->takes_scalar || (scalar.has_value() && std::isfinite(*scalar) && *scalar > 0),
              op, ": activation_scalar must be finite and positive for '", name, "', got ",
              scalar.has_value() ? std::to_string(*scalar) : "None");
  return {found->kind, scalar.value_or(0.0)};
}

// One function serves the CPU, CUDA and meta; every other backend gets check_input's error.
TORCH_LIBRARY_IMPL(memopt, CompositeExplicitAutograd, m) {
  m.impl("_activation_forward", _activation_forward);
  m.impl("_activation_forward_", _activation_forward_);
  m.impl("_activation_backward", _activation_backward);
  m.impl("_activation_backward_", _activation_backward_);
}

}  // namespace memopt::ops
