// PyTorch's copies inside a converted model: of a tensor in another layout, padded, rolled,
// shuffled, and of several tensors in one. They are PyTorch's own, and save nothing; where what is
// copied has a recipe the registry is told how the copy is made from it, so that a convolution
// behind a padding, or a linear behind a window of attention, does not keep the copy.
#include <ATen/Operators.h>
#include <ATen/core/IListRef.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include <algorithm>

#include "made_of.h"

namespace memopt::intercept {

namespace {

using at::Tensor;

// `run` joins tensors as forward did.
template <class List, class Run>
void note_joined(const Tensor& joined, const List& tensors, Run run) {
  if (!joined.requires_grad()) return;
  const Here now = here();
  if (!now.functions) return;
  std::vector<Tensor> parts;
  for (const Tensor& part : tensors) parts.push_back(part);
  const bool is_made = std::any_of(parts.begin(), parts.end(),
                                   [&](const Tensor& part) { return now.recipes->may_make(part); });
  const bool are_known = std::all_of(parts.begin(), parts.end(), [&](const Tensor& part) {
    return supports(part) && part.scalar_type() == joined.scalar_type();
  });
  if (!is_made || !are_known) return;
  const PassOn pass_on;
  now.recipes->add_made_of(joined, {std::move(parts), std::move(run)}, /*is_sum=*/false);
}

Tensor cat(c10::DispatchKeySet keys, const at::ITensorListRef& tensors, int64_t dim) {
  Tensor joined = at::_ops::cat::redispatch(below_intercept(keys), tensors, dim);
  note_joined(joined, tensors, [dim](const auto& read) { return at::cat(read, dim); });
  return joined;
}

Tensor stack(c10::DispatchKeySet keys, at::TensorList tensors, int64_t dim) {
  Tensor joined = at::_ops::stack::redispatch(below_intercept(keys), tensors, dim);
  note_joined(joined, tensors, [dim](const auto& read) { return at::stack(read, dim); });
  return joined;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, DeferredInit, m) {
  m.impl("cat", cat);
  m.impl("stack", stack);
  MEMOPT_MADE_OF(clone)
  MEMOPT_MADE_OF(roll)
  MEMOPT_MADE_OF(flip)
  MEMOPT_MADE_OF(repeat)
  MEMOPT_MADE_OF(constant_pad_nd)
  MEMOPT_MADE_OF(reflection_pad1d)
  MEMOPT_MADE_OF(reflection_pad2d)
  MEMOPT_MADE_OF(reflection_pad3d)
  MEMOPT_MADE_OF(replication_pad1d)
  MEMOPT_MADE_OF(replication_pad2d)
  MEMOPT_MADE_OF(replication_pad3d)
  MEMOPT_MADE_OF(pixel_shuffle)
  MEMOPT_MADE_OF(pixel_unshuffle)
  MEMOPT_MADE_OF(channel_shuffle)
}

}  // namespace memopt::intercept
