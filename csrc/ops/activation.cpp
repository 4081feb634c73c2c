// Activations below autograd. Elementwise: work on any dense layout in memory order.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include <cmath>
#include <string>
#include <string_view>
#include <tuple>

#include "activation.h"
#include "checks.h"
#include "declare.h"
#include "launch.h"
#include "layout.h"
#include "private_ops.h"
#include "tensors.h"

namespace memopt::ops {
namespace {

using kernels::ActivationSpec;
using kernels::cpu::Kernels;

// The name in errors: the activation's, as a user calls it.
std::string op_name(std::string_view activation, bool backward) {
  const std::string name(activation == "gelu_tanh" ? "gelu" : activation);
  return backward ? name + " backward" : name;
}

// y may be x. Both are dense, in the same order.
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

// All dense, in the same order. dx may be dy, y undefined or x.
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

}  // namespace

Tensor _activation_forward(const Tensor& input, std::string_view name, Scalar scalar) {
  const ActivationSpec activation = parse_activation("activation", name, scalar);
  const std::string name_in_errors = op_name(name, /*backward=*/false);
  const char* op = name_in_errors.c_str();
  check_input(op, "input", input);
  const Tensor y = empty_elementwise(input);
  if (input.is_meta()) return y;
  if (in_same_order(input, y)) {
    run_forward(op, input, y, activation);
  } else {
    y.copy_(input);
    run_forward(op, y, y, activation);
  }
  return y;
}

void _activation_forward_(const Tensor& input, std::string_view name, Scalar scalar) {
  const ActivationSpec activation = parse_activation("activation", name, scalar);
  const std::string name_in_errors = op_name(name, /*backward=*/false);
  const char* op = name_in_errors.c_str();
  check_input(op, "input", input);
  TORCH_CHECK(input.is_non_overlapping_and_dense(), op,
              ": input must be dense where the result is written over it, got strides ",
              input.sym_strides());
  if (!input.is_meta()) run_forward(op, input, input, activation);
}

Results2 _activation_backward(const Tensor& grad_output, const Tensor& input, std::string_view name,
                              Scalar scalar, bool recompute_output) {
  const ActivationSpec activation = parse_activation("activation backward", name, scalar);
  const std::string name_in_errors = op_name(name, /*backward=*/true);
  const char* op = name_in_errors.c_str();
  check_input(op, "input", input);
  check_like_input(op, "grad_output", grad_output, input);
  const Tensor dx = empty_activation_gradient(activation, grad_output, input);
  const Tensor y = recompute_output ? empty_elementwise(input) : Tensor();
  if (input.is_meta()) return {dx, y};
  const bool y_fits = !y.defined() || in_same_order(y, dx);
  const Tensor y_written = y_fits ? y : at::empty_like(dx);
  run_backward(op, in_order_of(grad_output, dx), in_order_of(input, dx), dx, y_written, activation);
  deliver(y_written, y);
  return {dx, y};
}

void _activation_backward_(const Tensor& grad_output, const Tensor& input, std::string_view name,
                           Scalar scalar, const OptionalTensor& output) {
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

Tensor empty_activation_gradient(const ActivationSpec& activation, const Tensor& dy,
                                 const Tensor& x) {
  using kernels::Activation;
  const bool is_relu =
      activation.kind == Activation::kRelu || activation.kind == Activation::kReluSquared;
  return is_relu ? empty_elementwise({x, dy}) : empty_elementwise({dy, x});
}

// One function serves the CPU, CUDA and meta; every other backend gets check_input's error.
MEMOPT_DECLARE_PRIVATE(
    _activation_forward, {},
    "_activation_forward(Tensor input, *, str activation, float? activation_scalar=None)"
    " -> Tensor");
MEMOPT_DECLARE_PRIVATE(
    _activation_forward_, {},
    "_activation_forward_(Tensor(a!) input, *, str activation, float? activation_scalar=None)"
    " -> ()");
MEMOPT_DECLARE_PRIVATE(_activation_backward, {},
                       "_activation_backward(Tensor grad_output, Tensor input, *, str activation,"
                       " float? activation_scalar=None, bool recompute_output=False)"
                       " -> (Tensor grad_input, Tensor output)");
MEMOPT_DECLARE_PRIVATE(
    _activation_backward_, {},
    "_activation_backward_(Tensor(a!) grad_output, Tensor input, *, str activation,"
    " float? activation_scalar=None, Tensor(b!)? output=None) -> ()");

}  // namespace memopt::ops
