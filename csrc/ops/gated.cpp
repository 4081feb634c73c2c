// Gated units below autograd. gate and up are taken by rows, where their strides allow it without a
// copy: the halves of one tensor do. Outputs are contiguous.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>
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
using kernels::GatedBackwardParams;
using kernels::GatedForwardParams;
using kernels::cpu::Kernels;
using OptionalTensor = std::optional<Tensor>;

// Rows and columns of a tensor whose last dimension the kernels take as columns.
struct Shape {
  int64_t rows;
  int64_t cols;

  explicit Shape(const Tensor& y)
      : rows(y.dim() == 0 ? 1 : c10::multiply_integers(y.sizes().slice(0, y.dim() - 1))),
        cols(y.dim() == 0 ? 1 : y.size(-1)) {}
};

Tensor empty(c10::SymIntArrayRef sizes, const Tensor& like) {
  return at::empty_symint(sizes, like.options());
}

// One long row where nothing lies between the rows: work is then cut anywhere.
template <class Params>
void join_rows(Params& p, bool dense) {
  if (!dense) return;
  p.cols *= p.rows;
  p.rows = 1;
}

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

// y may be gate, if that is contiguous.
void run_forward(const char* op, const Tensor& gate, const Tensor& up, const Tensor& y,
                 Activation activation) {
  const Shape shape(y);
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

Tensor forward(const char* op, const Tensor& gate, const Tensor& up, Activation activation) {
  check_forward(op, gate, up);
  const Tensor y = empty(gate.sym_sizes(), gate);
  if (!gate.is_meta()) run_forward(op, gate, up, y, activation);
  return y;
}

void _gated_forward_(const Tensor& gate, const Tensor& up, std::string_view name) {
  const Activation activation = parse_activation("gated", name);
  check_forward("gated", gate, up);
  check_contiguous("gated", "gate", gate);
  if (!gate.is_meta()) run_forward("gated", gate, up, gate, activation);
}

// The name in errors.
const char* backward_name(Activation activation, bool packed) {
  switch (activation) {
    case Activation::kSilu:
      return packed ? "swiglu_packed backward" : "swiglu backward";
    case Activation::kGelu:
    case Activation::kGeluTanh:
      return packed ? "geglu_packed backward" : "geglu backward";
    default:
      return packed ? "gated_packed backward" : "gated backward";
  }
}

// Undefined: not wanted. dgate may be dy, dup up and y gate, if those are contiguous.
struct Gradients {
  Tensor dgate;
  Tensor dup;
  Tensor y;
};

void run_backward(const char* op, const Tensor& dy, const Tensor& gate, const OptionalTensor& up,
                  const Gradients& to, Activation activation) {
  const Shape shape(gate);
  const Rows dys = as_rows(dy, shape.rows, shape.cols);
  const Rows gates = as_rows(gate, shape.rows, shape.cols);
  const bool has_up = up.has_value() && up->defined();
  const Rows ups = has_up ? as_rows(*up, shape.rows, shape.cols) : Rows{Tensor(), shape.cols};
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

void check_backward(const char* op, const Tensor& dy, const Tensor& gate,
                    const OptionalTensor& up) {
  check_input(op, "gate", gate);
  check_like(op, "grad_output", dy, "gate", gate);
  if (up.has_value() && up->defined()) check_like(op, "up", *up, "gate", gate);
}

std::tuple<Tensor, Tensor, Tensor> _gated_backward(const Tensor& grad_output, const Tensor& gate,
                                                   const OptionalTensor& up, std::string_view name,
                                                   std::array<bool, 2> output_mask,
                                                   bool recompute_output) {
  const Activation activation = parse_activation("gated backward", name);
  const char* op = backward_name(activation, /*packed=*/false);
  check_backward(op, grad_output, gate, up);
  const bool has_up = up.has_value() && up->defined();
  TORCH_CHECK(has_up || !(output_mask[0] || recompute_output), op,
              ": up must be a tensor where grad_gate or the output is wanted, got None");
  const auto result = [&](bool wanted) {
    return wanted ? empty(gate.sym_sizes(), gate) : Tensor();
  };
  const Gradients to{result(output_mask[0]), result(output_mask[1]), result(recompute_output)};
  const bool anything = output_mask[0] || output_mask[1] || recompute_output;
  if (!gate.is_meta() && anything) run_backward(op, grad_output, gate, up, to, activation);
  return {to.dgate, to.dup, to.y};
}

void _gated_backward_(const Tensor& grad_output, const Tensor& gate, const Tensor& up,
                      std::string_view name, const OptionalTensor& grad_up,
                      const OptionalTensor& output) {
  const Activation activation = parse_activation("gated backward", name);
  const char* op = backward_name(activation, /*packed=*/false);
  check_backward(op, grad_output, gate, up);
  const Gradients to{grad_output, grad_up.value_or(Tensor()), output.value_or(Tensor())};
  const auto check_result = [&](const char* name, const Tensor& tensor) {
    if (!tensor.defined()) return;
    check_like(op, name, tensor, "gate", gate);
    check_contiguous(op, name, tensor);
  };
  check_result("grad_output", to.dgate);
  check_result("grad_up", to.dup);
  check_result("output", to.y);
  if (!gate.is_meta()) run_backward(op, grad_output, gate, up, to, activation);
}

// The output's sizes: half of input's last dimension.
c10::SymDimVector packed_sizes(const char* op, const Tensor& input) {
  check_input(op, "input", input);
  const c10::SymIntArrayRef sizes = input.sym_sizes();
  TORCH_CHECK(!sizes.empty(), op,
              ": input must have a last dimension that holds gate and up, got a scalar");
  TORCH_CHECK(TORCH_GUARD_OR_TRUE((sizes.back() % 2).sym_eq(0)), op,
              ": input's last dimension holds gate and up and must be even, got ", sizes.back());
  c10::SymDimVector halved(sizes.begin(), sizes.end());
  halved.back() = halved.back() / 2;
  return halved;
}

// Where up begins, in a tensor like `tensor`.
const char* up_of(const void* gate, const Tensor& tensor, int64_t cols, bool interleaved) {
  return static_cast<const char*>(gate) +
         (interleaved ? 1 : cols) * static_cast<int64_t>(tensor.element_size());
}

Tensor packed_forward(const char* op, const Tensor& input, Activation activation,
                      bool interleaved) {
  const Tensor y = empty(packed_sizes(op, input), input);
  if (input.is_meta()) return y;
  const Shape shape(y);
  const Rows x = as_rows(input, shape.rows, 2 * shape.cols);
  GatedForwardParams p{.gate = x.data(),
                       .up = up_of(x.data(), input, shape.cols, interleaved),
                       .y = y.mutable_data_ptr(),
                       .rows = shape.rows,
                       .cols = shape.cols,
                       .gate_row_stride = x.row_stride,
                       .up_row_stride = x.row_stride,
                       .interleaved = interleaved,
                       .dtype = scalar_type(input),
                       .activation = activation,
                       .stream_stores = exceeds_cache(y, 3)};
  join_rows(p, interleaved && x.row_stride == 2 * p.cols);
  run(op, input, p);
  return y;
}

std::tuple<Tensor, Tensor> _gated_packed_backward(const Tensor& grad_output, const Tensor& input,
                                                  std::string_view name, bool interleaved,
                                                  bool recompute_output) {
  const Activation activation = parse_activation("gated_packed backward", name);
  const char* op = backward_name(activation, /*packed=*/true);
  const c10::SymDimVector sizes = packed_sizes(op, input);
  check_like(op, "grad_output", grad_output, "input", input, sizes);
  const Tensor dx = empty(input.sym_sizes(), input);
  const Tensor y = recompute_output ? empty(sizes, input) : Tensor();
  if (input.is_meta()) return {dx, y};
  const Shape shape(grad_output);
  const Rows dys = as_rows(grad_output, shape.rows, shape.cols);
  const Rows x = as_rows(input, shape.rows, 2 * shape.cols);
  char* dgate = static_cast<char*>(dx.mutable_data_ptr());
  GatedBackwardParams p{.dy = dys.data(),
                        .gate = x.data(),
                        .up = up_of(x.data(), input, shape.cols, interleaved),
                        .dgate = dgate,
                        .dup = dgate + (up_of(dgate, input, shape.cols, interleaved) - dgate),
                        .y = mutable_data(y),
                        .rows = shape.rows,
                        .cols = shape.cols,
                        .dy_row_stride = dys.row_stride,
                        .gate_row_stride = x.row_stride,
                        .up_row_stride = x.row_stride,
                        .grad_row_stride = 2 * shape.cols,
                        .interleaved = interleaved,
                        .dtype = scalar_type(input),
                        .activation = activation,
                        .stream_stores = exceeds_cache(grad_output, 5)};
  join_rows(p, interleaved && x.row_stride == 2 * p.cols && p.dy_row_stride == p.cols);
  run(op, input, p);
  return {dx, y};
}

Tensor gated(const Tensor& gate, const Tensor& up, std::string_view activation) {
  return forward("gated", gate, up, parse_activation("gated", activation));
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  return forward("swiglu", gate, up, Activation::kSilu);
}

Tensor geglu(const Tensor& gate, const Tensor& up, std::string_view approximate) {
  return forward("geglu", gate, up, gelu_activation(parse_approximate("geglu", approximate)));
}

Tensor gated_packed(const Tensor& input, std::string_view activation, bool interleaved) {
  return packed_forward("gated_packed", input, parse_activation("gated_packed", activation),
                        interleaved);
}

Tensor swiglu_packed(const Tensor& input, bool interleaved) {
  return packed_forward("swiglu_packed", input, Activation::kSilu, interleaved);
}

Tensor geglu_packed(const Tensor& input, bool interleaved, std::string_view approximate) {
  return packed_forward("geglu_packed", input,
                        gelu_activation(parse_approximate("geglu_packed", approximate)),
                        interleaved);
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, CompositeExplicitAutograd, m) {
  m.impl("gated", gated);
  m.impl("swiglu", swiglu);
  m.impl("geglu", geglu);
  m.impl("_gated_forward_", _gated_forward_);
  m.impl("_gated_backward", _gated_backward);
  m.impl("_gated_backward_", _gated_backward_);
  m.impl("gated_packed", gated_packed);
  m.impl("swiglu_packed", swiglu_packed);
  m.impl("geglu_packed", geglu_packed);
  m.impl("_gated_packed_backward", _gated_packed_backward);
}

}  // namespace memopt::ops
