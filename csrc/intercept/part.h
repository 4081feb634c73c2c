// What a recipe reads of an operand that is a view: the whole tensor, where that lives on and the
// view does not.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "../saved/geometry.h"
#include "taken.h"

namespace memopt::intercept {

struct Part {
  at::Tensor whole;
  std::optional<saved::Geometry> view = {};  // of the storage of `whole`

  // The operand, from `whole` or from what a recipe has made in its place.
  at::Tensor of(const at::Tensor& made) const {
    return view.has_value() ? saved::view_of_storage(made, *view) : made;
  }
  Part without_memory() const { return {at::Tensor(), view}; }
};

// The operand as a part of the tensor that it is a view of; as it is if it is none, or memopt's ops
// do not take that.
inline Part part_of_base(const at::Tensor& operand) {
  if (!operand.is_view()) return {operand};
  const at::Tensor base(operand._base());
  if (!supports(base) || base.storage_offset() != 0 || !base.is_non_overlapping_and_dense())
    return {operand};
  return {base, saved::Geometry::of(operand)};
}

inline bool is_parameter(const at::Tensor& tensor) {
  return tensor.is_leaf() && tensor.requires_grad();
}

// The same where the base is a parameter, which its gradient's node holds.
inline Part part_of_parameter(const at::Tensor& operand) {
  if (!operand.is_view()) return {operand};
  Part part = part_of_base(operand);
  return is_parameter(part.whole) ? part : Part{operand};
}

}  // namespace memopt::intercept
