// Gated units whose gate and up are halves of one tensor, below autograd.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <string_view>

#include "activation.h"
#include "checks.h"
#include "declare.h"
#include "gated.h"
#include "launch.h"
#include "layout.h"
#include "private_ops.h"
#include "tensors.h"

namespace memopt::ops {
namespace {

using kernels::ActivationSpec;
using kernels::GatedBackwardParams;
using kernels::GatedForwardParams;

Tensor empty(c10::SymIntArrayRef sizes, const Tensor& like) {
  return at::empty_symint(sizes, like.options());
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

// Uninitialised: f(gate) up of the halves by PyTorch's ops.
Tensor empty_packed_output(c10::SymIntArrayRef sizes, const Tensor& input, bool interleaved) {
  if (input.is_contiguous_or_false()) return empty(sizes, input);
  c10::SymDimVector strides(input.sym_strides().begin(), input.sym_strides().end());
  if (interleaved) strides.back() *= 2;
  return at::empty_strided_symint(sizes, elementwise_strides(sizes, c10::SymIntArrayRef(strides)),
                                  input.options());
}

// Uninitialised: the halves' gradients, concatenated, which keeps channels-last alone.
Tensor empty_packed_gradient(const Tensor& grad_output, const Tensor& input, bool interleaved) {
  if (interleaved || !is_channels_last(grad_output)) return empty(input.sym_sizes(), input);
  const auto sizes = input.sym_sizes();
  return at::empty_strided_symint(sizes, elementwise_strides(sizes, grad_output.sym_strides()),
                                  input.options());
}

}  // namespace

Tensor _gated_packed_forward(const Tensor& input, std::string_view name, Scalar scalar,
                             bool interleaved) {
  const ActivationSpec activation = parse_activation("gated_packed", name, scalar);
  const char* op = gated_op_name(name, /*packed=*/true, /*backward=*/false);
  const Tensor output = empty_packed_output(packed_sizes(op, input), input, interleaved);
  if (input.is_meta()) return output;
  const Tensor y = contiguous_buffer(output);
  const GatedShape shape(y);
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
  deliver(y, output);
  return output;
}

Results2 _gated_packed_backward(const Tensor& grad_output, const Tensor& input,
                                std::string_view name, Scalar scalar, bool interleaved,
                                bool recompute_output) {
  const ActivationSpec activation = parse_activation("gated_packed backward", name, scalar);
  const char* op = gated_op_name(name, /*packed=*/true, /*backward=*/true);
  const c10::SymDimVector sizes = packed_sizes(op, input);
  check_like(op, "grad_output", grad_output, "input", input, sizes);
  const Tensor grad_input = empty_packed_gradient(grad_output, input, interleaved);
  const Tensor output =
      recompute_output ? empty_packed_output(sizes, input, interleaved) : Tensor();
  if (input.is_meta()) return {grad_input, output};
  const Tensor dx = contiguous_buffer(grad_input), y = contiguous_buffer(output);
  const GatedShape shape(grad_output);
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
  deliver(dx, grad_input);
  deliver(y, output);
  return {grad_input, output};
}

MEMOPT_DECLARE_PRIVATE(
    _gated_packed_forward, {},
    "_gated_packed_forward(Tensor input, *, str activation, float? activation_scalar=None,"
    " bool interleaved=False) -> Tensor");
MEMOPT_DECLARE_PRIVATE(
    _gated_packed_backward, {},
    "_gated_packed_backward(Tensor grad_output, Tensor input, *, str activation,"
    " float? activation_scalar=None, bool interleaved=False, bool recompute_output=False)"
    " -> (Tensor grad_input, Tensor output)");

}  // namespace memopt::ops
