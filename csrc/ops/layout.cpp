#include "layout.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <numeric>

#include "tensors.h"

namespace memopt::ops {
namespace {

// 1 if dimension a belongs outside of b in memory, -1 if inside, 0 if no input tells. A stride of
// zero (an expanded dimension) tells nothing, and of equal strides the longer dimension is outside.
int compare(c10::SymIntArrayRef sizes, at::ArrayRef<c10::SymIntArrayRef> inputs, int64_t a,
            int64_t b) {
  const auto place_a = static_cast<size_t>(a), place_b = static_cast<size_t>(b);
  for (const c10::SymIntArrayRef& strides : inputs) {
    const c10::SymInt &stride_a = strides[place_a], &stride_b = strides[place_b];
    if (TORCH_GUARD_OR_FALSE(stride_a.sym_eq(0)) || TORCH_GUARD_OR_FALSE(stride_b.sym_eq(0))) {
      continue;
    }
    if (TORCH_GUARD_OR_FALSE(stride_a.sym_lt(stride_b))) return -1;
    if (TORCH_GUARD_OR_FALSE(stride_a.sym_gt(stride_b))) return 1;
    if (TORCH_GUARD_OR_FALSE(sizes[place_a].sym_gt(sizes[place_b]))) return 1;
  }
  return 0;
}

}  // namespace

c10::SymDimVector elementwise_strides(c10::SymIntArrayRef sizes,
                                      at::ArrayRef<c10::SymIntArrayRef> inputs) {
  // As TensorIterator's reorder_dimensions: an insertion sort, since the order is a partial one.
  const auto dims = static_cast<int64_t>(sizes.size());
  at::DimVector inner_first(sizes.size());
  std::iota(inner_first.rbegin(), inner_first.rend(), 0);
  for (int64_t i = 1; i < dims; ++i) {
    int64_t moving = i;
    for (int64_t other = i - 1; other >= 0; --other) {
      const int order = compare(sizes, inputs, inner_first[static_cast<size_t>(other)],
                                inner_first[static_cast<size_t>(moving)]);
      if (order < 0) break;
      if (order == 0) continue;
      std::swap(inner_first[static_cast<size_t>(other)], inner_first[static_cast<size_t>(moving)]);
      moving = other;
    }
  }
  c10::SymDimVector strides(sizes.size());
  c10::SymInt next = 1;
  for (const int64_t dim : inner_first) {
    strides[static_cast<size_t>(dim)] = next;
    next *= sizes[static_cast<size_t>(dim)];
  }
  return strides;
}

at::Tensor empty_elementwise(at::TensorList inputs) {
  const at::Tensor& first = inputs[0];
  const bool contiguous = std::all_of(inputs.begin(), inputs.end(), [](const at::Tensor& tensor) {
    return tensor.is_contiguous_or_false();
  });
  if (contiguous) return at::empty_symint(first.sym_sizes(), first.options());
  c10::SmallVector<c10::SymIntArrayRef, 4> strides;
  for (const at::Tensor& input : inputs) strides.push_back(input.sym_strides());
  return at::empty_strided_symint(first.sym_sizes(),
                                  elementwise_strides(first.sym_sizes(), strides), first.options());
}

bool in_same_order(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_contiguous()) return b.is_contiguous();
  return a.strides() == b.strides() && a.is_non_overlapping_and_dense();
}

at::Tensor in_order_of(const at::Tensor& tensor, const at::Tensor& like) {
  return in_same_order(tensor, like) ? tensor : at::empty_like(like).copy_(tensor);
}

at::Tensor contiguous_buffer(const at::Tensor& result) {
  return !result.defined() || result.is_contiguous() ? result : empty_contiguous(result);
}

void deliver(const at::Tensor& buffer, const at::Tensor& result) {
  if (!buffer.is_same(result)) result.copy_(buffer);
}

at::DimVector memory_order(const at::Tensor& dense) {
  at::DimVector dims(static_cast<size_t>(dense.dim()));
  std::iota(dims.begin(), dims.end(), 0);
  std::stable_sort(dims.begin(), dims.end(),
                   [&](int64_t a, int64_t b) { return dense.stride(a) > dense.stride(b); });
  return dims;
}

bool is_channels_last(const at::Tensor& tensor) {
  if (tensor.dim() < 4 || tensor.is_contiguous_or_false()) return false;
  const at::MemoryFormat format = tensor.suggest_memory_format();
  return format == at::MemoryFormat::ChannelsLast || format == at::MemoryFormat::ChannelsLast3d;
}

}  // namespace memopt::ops
