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
#include "part.h"

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

// A copy that repeats elements (the deviation of a group, for each of the group's) is larger than
// what it is made of, which is mostly kept.
Tensor clone(c10::DispatchKeySet keys, const Tensor& self,
             std::optional<at::MemoryFormat> memory_format) {
  const bool may_repeat = self.requires_grad() && self.is_view() && here().functions &&
                          supports(self) && self.numel() > self._base().numel();
  if (!may_repeat) return MadeOf<at::_ops::clone>::Call::call(keys, self, memory_format);
  Tensor copy = at::_ops::clone::redispatch(below_intercept(keys), self, memory_format);
  const PassOn pass_on;
  const Part part = part_of_base(self);
  here().recipes->add_made_of_kept(
      copy, {{part.whole}, [part = part.without_memory(), memory_format](const auto& read) {
               return part.of(read[0]).clone(memory_format);
             }});
  return copy;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, DeferredInit, m) {
  m.impl("cat", cat);
  m.impl("clone", clone);
  m.impl("stack", stack);
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
