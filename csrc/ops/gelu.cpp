// GELU below autograd. Elementwise: works on any dense layout in memory order, and the output takes
// input's strides.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <string_view>
#include <tuple>

#include "checks.h"
#include "launch.h"
#include "tensors.h"

namespace memopt::ops {
namespace {

using at::Tensor;
using kernels::cpu::Kernels;

constexpr int64_t kBlock = 4096;  // elements; a multiple of every vector and cache line

// Runs body(begin, end) over [0, size) in whole blocks.
template <class Body>
void parallel_blocks(int64_t size, const Body& body) {
  parallel(kernels::ceil_div(size, kBlock), kBlock,
           [&](int64_t begin, int64_t end) { body(begin * kBlock, std::min(end * kBlock, size)); });
}

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

Tensor gelu_forward(const char* op, const Tensor& input, std::string_view approximate) {
  check_input(op, "input", input);
  const kernels::GeluKind kind = parse_approximate(op, approximate);
  if (input.is_meta()) return at::empty_like(input);
  const Tensor x = dense(input);
  const Tensor y = at::empty_like(x);
  const kernels::GeluForwardParams p{
      x.const_data_ptr(), y.mutable_data_ptr(), x.numel(), scalar_type(x), kind,
      exceeds_cache(y, 2)};
  launch(
      op, x,
      [&](const Kernels& cpu) {
        parallel_blocks(p.size,
                        [&](int64_t begin, int64_t end) { cpu.gelu_forward(p, begin, end); });
      },
      MEMOPT_CUDA_KERNEL(gelu_forward), p);
  return y;
}

Tensor gelu(const Tensor& input, std::string_view approximate) {
  return gelu_forward("gelu", input, approximate);
}

Tensor _gelu_forward(const Tensor& input, std::string_view approximate) {
  return gelu_forward("gelu", input, approximate);
}

std::tuple<Tensor, Tensor> _gelu_backward(const Tensor& grad_output, const Tensor& input,
                                          std::string_view approximate, bool recompute_output) {
  const char* op = "gelu backward";
  check_input(op, "input", input);
  check_like_input(op, "grad_output", grad_output, input);
  const kernels::GeluKind kind = parse_approximate(op, approximate);
  const Tensor x = input.is_meta() ? input : dense(input);
  const Tensor dx = at::empty_like(x);
  const Tensor y = recompute_output ? at::empty_like(x) : Tensor();
  if (input.is_meta()) return {dx, y};
  const Tensor dy = in_order_of(grad_output, x);
  const kernels::GeluBackwardParams p{dy.const_data_ptr(),
                                      x.const_data_ptr(),
                                      dx.mutable_data_ptr(),
                                      mutable_data(y),
                                      x.numel(),
                                      scalar_type(x),
                                      kind,
                                      exceeds_cache(dx, 3)};
  launch(
      op, x,
      [&](const Kernels& cpu) {
        parallel_blocks(p.size,
                        [&](int64_t begin, int64_t end) { cpu.gelu_backward(p, begin, end); });
      },
      MEMOPT_CUDA_KERNEL(gelu_backward), p);
  return {dx, y};
}

}  // namespace

// One function serves the CPU, CUDA and meta; every other backend gets check_input's error.
TORCH_LIBRARY_IMPL(memopt, CompositeExplicitAutograd, m) {
  m.impl("gelu", gelu);
  m.impl("_gelu_forward", _gelu_forward);
  m.impl("_gelu_backward", _gelu_backward);
}

}  // namespace memopt::ops
