// Gated units below autograd. Kernels write contiguous tensors: where the results are dense in
// another order, they get all tensors with their dimensions in that order.
#include "gated.h"

#include <ATen/core/Tensor.h>

#include <array>
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
using kernels::GatedBackwardParams;
using kernels::GatedForwardParams;
using kernels::cpu::Kernels;

// `tensors` with their dimensions in the order that those of `dense` have in memory.
template <size_t kCount>
std::array<Tensor, kCount> permuted_like(const Tensor& dense,
                                         const std::array<Tensor, kCount>& tensors) {
  const at::DimVector order = memory_order(dense);
  std::array<Tensor, kCount> permuted;
  for (size_t i = 0; i < kCount; ++i) {
    if (tensors[i].defined()) permuted[i] = tensors[i].permute(order);
  }
  return permuted;
}

// y is contiguous, and may be gate.
void run_gated_forward(const char* op, const Tensor& gate, const Tensor& up, const Tensor& y,
                       const ActivationSpec& activation) {
  const GatedShape shape(y);
  const Rows gates = as_rows(gate, shape.rows, shape.cols);
  const Rows ups = as_rows(up, shape.rows, shape.cols);
  GatedForwardParams p{.gate = gates.data(),
                       .up = ups.data(),
                       .y = y.mutable_data_ptr(),
                       .rows = shape.rows,
                       .cols = shape.cols,
                       .gate_row_stride = gates.row_stride,
                       .up_row_stride = ups.row_stride,
                       .interleaved = false,
                       .dtype = scalar_type(gate),
                       .activation = activation,
                       .stream_stores = !y.is_same(gate) && exceeds_cache(y, 3)};
  join_rows(p, p.gate_row_stride == p.cols && p.up_row_stride == p.cols);
  run(op, gate, p);
}

void check_forward(const char* op, const Tensor& gate, const Tensor& up) {
  check_input(op, "gate", gate);
  check_like(op, "up", up, "gate", gate);
}

// Undefined: not wanted. Contiguous for a kernel; dgate may be dy, dup up and y gate.
struct GatedGradients {
  Tensor dgate;
  Tensor dup;
  Tensor y;
};

void run_gated_backward(const char* op, const Tensor& dy, const Tensor& gate, const Tensor& up,
                        const GatedGradients& to, const ActivationSpec& activation) {
  const GatedShape shape(gate);
  const Rows dys = as_rows(dy, shape.rows, shape.cols);
  const Rows gates = as_rows(gate, shape.rows, shape.cols);
  const Rows ups = up.defined() ? as_rows(up, shape.rows, shape.cols) : Rows{Tensor(), shape.cols};
  GatedBackwardParams p{.dy = dys.data(),
                        .gate = gates.data(),
                        .up = const_data(ups.tensor),
                        .dgate = mutable_data(to.dgate),
                        .dup = mutable_data(to.dup),
                        .y = mutable_data(to.y),
                        .rows = shape.rows,
                        .cols = shape.cols,
                        .dy_row_stride = dys.row_stride,
                        .gate_row_stride = gates.row_stride,
                        .up_row_stride = ups.row_stride,
                        .grad_row_stride = shape.cols,
                        .interleaved = false,
                        .dtype = scalar_type(gate),
                        .activation = activation,
                        .stream_stores = !to.dgate.is_same(dy) && exceeds_cache(gate, 5)};
  join_rows(p,
            p.dy_row_stride == p.cols && p.gate_row_stride == p.cols && p.up_row_stride == p.cols);
  run(op, gate, p);
}

void check_gated_backward(const char* op, const Tensor& dy, const Tensor& gate,
                          const OptionalTensor& up) {
  check_input(op, "gate", gate);
  check_like(op, "grad_output", dy, "gate", gate);
  if (up.has_value() && up->defined()) check_like(op, "up", *up, "gate", gate);
}

}  // namespace

void run(const char* op, const Tensor& device, const GatedForwardParams& p) {
  if (p.rows == 0 || p.cols == 0) return;
  launch(
      op, device,
      [&](const Kernels& cpu) {
        parallel_blocks(p.rows * p.cols,
                        [&](int64_t begin, int64_t end) { cpu.gated_forward(p, begin, end); });
      },
      MEMOPT_CUDA_KERNEL(gated_forward), p);
}

void run(const char* op, const Tensor& device, const GatedBackwardParams& p) {
  if (p.rows == 0 || p.cols == 0) return;
  launch(
      op, device,
      [&](const Kernels& cpu) {
        parallel_blocks(p.rows * p.cols,
                        [&](int64_t begin, int64_t end) { cpu.gated_backward(p, begin, end); });
      },
      MEMOPT_CUDA_KERNEL(gated_backward), p);
}

const char* gated_op_name(std::string_view activation, bool packed, bool backward) {
  if (activation == "silu") {
    if (packed) return backward ? "swiglu_packed backward" : "swiglu_packed";
    return backward ? "swiglu backward" : "swiglu";
  }
  if (activation == "gelu" || activation == "gelu_tanh") {
    if (packed) return backward ? "geglu_packed backward" : "geglu_packed";
    return backward ? "geglu backward" : "geglu";
  }
  if (packed) return backward ? "gated_packed backward" : "gated_packed";
  return backward ? "gated backward" : "gated";
}

Tensor _gated_forward(const Tensor& gate, const Tensor& up, std::string_view name, Scalar scalar) {
  const ActivationSpec activation = parse_activation("gated", name, scalar);
  const char* op = gated_op_name(name, /*packed=*/false, /*backward=*/false);
  check_forward(op, gate, up);
  const Tensor y = empty_elementwise(gate);
  if (gate.is_meta()) return y;
  if (y.is_contiguous()) {
    run_gated_forward(op, gate, up, y, activation);
  } else {
    const auto in_order = permuted_like<3>(y, {gate, up, y});
    run_gated_forward(op, in_order[0], in_order[1], in_order[2], activation);
  }
  return y;
}

void _gated_forward_(const Tensor& gate, const Tensor& up, std::string_view name, Scalar scalar) {
  const ActivationSpec activation = parse_activation("gated", name, scalar);
  const char* op = gated_op_name(name, /*packed=*/false, /*backward=*/false);
  check_forward(op, gate, up);
  check_contiguous(op, "gate", gate);
  if (!gate.is_meta()) run_gated_forward(op, gate, up, gate, activation);
}

Results3 _gated_backward(const Tensor& grad_output, const Tensor& gate, const OptionalTensor& up,
                         std::string_view name, Scalar scalar, std::array<bool, 2> output_mask,
                         bool recompute_output) {
  const ActivationSpec activation = parse_activation("gated backward", name, scalar);
  const char* op = gated_op_name(name, /*packed=*/false, /*backward=*/true);
  check_gated_backward(op, grad_output, gate, up);
  const bool has_up = up.has_value() && up->defined();
  TORCH_CHECK(has_up || !(output_mask[0] || recompute_output), op,
              ": up must be a tensor where grad_gate or the output is wanted, got None");
  const auto [wants_dgate, wants_dup] = output_mask;
  const std::array<Tensor, 3> results = {
      wants_dgate ? empty_activation_gradient(activation, grad_output, gate) : Tensor(),
      wants_dup ? empty_elementwise({grad_output, gate}) : Tensor(),
      recompute_output ? empty_elementwise(gate) : Tensor()};
  const Tensor& first = results[wants_dgate ? 0 : wants_dup ? 1 : 2];
  if (!gate.is_meta() && first.defined()) {
    const Tensor u = up.value_or(Tensor());
    std::array<Tensor, 6> t = {grad_output, gate, u, results[0], results[1], results[2]};
    if (!first.is_contiguous()) t = permuted_like(first, t);
    const GatedGradients to{contiguous_buffer(t[3]), contiguous_buffer(t[4]),
                            contiguous_buffer(t[5])};
    run_gated_backward(op, t[0], t[1], t[2], to, activation);
    deliver(to.dgate, t[3]);
    deliver(to.dup, t[4]);
    deliver(to.y, t[5]);
  }
  return {results[0], results[1], results[2]};
}

void _gated_backward_(const Tensor& grad_output, const Tensor& gate, const Tensor& up,
                      std::string_view name, Scalar scalar, const OptionalTensor& grad_up,
                      const OptionalTensor& output) {
  const ActivationSpec activation = parse_activation("gated backward", name, scalar);
  const char* op = gated_op_name(name, /*packed=*/false, /*backward=*/true);
  check_gated_backward(op, grad_output, gate, up);
  const GatedGradients to{grad_output, grad_up.value_or(Tensor()), output.value_or(Tensor())};
  const auto check_result = [&](const char* name, const Tensor& tensor) {
    if (!tensor.defined()) return;
    check_like(op, name, tensor, "gate", gate);
    check_contiguous(op, name, tensor);
  };
  check_result("grad_output", to.dgate);
  check_result("grad_up", to.dup);
  check_result("output", to.y);
  if (!gate.is_meta()) run_gated_backward(op, grad_output, gate, up, to, activation);
}

MEMOPT_DECLARE_PRIVATE(_gated_forward, {},
                       "_gated_forward(Tensor gate, Tensor up, *, str activation,"
                       " float? activation_scalar=None) -> Tensor");
MEMOPT_DECLARE_PRIVATE(_gated_forward_, {},
                       "_gated_forward_(Tensor(a!) gate, Tensor up, *, str activation,"
                       " float? activation_scalar=None) -> ()");
MEMOPT_DECLARE_PRIVATE(
    _gated_backward, {},
    "_gated_backward(Tensor grad_output, Tensor gate, Tensor? up, *, str activation,"
    " float? activation_scalar=None, bool[2] output_mask, bool recompute_output=False)"
    " -> (Tensor grad_gate, Tensor grad_up, Tensor output)");
MEMOPT_DECLARE_PRIVATE(
    _gated_backward_, {},
    "_gated_backward_(Tensor(a!) grad_output, Tensor gate, Tensor up, *, str activation,"
    " float? activation_scalar=None, Tensor(b!)? grad_up=None, Tensor(c!)? output=None) -> ()");

}  // namespace memopt::ops
