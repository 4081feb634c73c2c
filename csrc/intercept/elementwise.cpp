// PyTorch's sums and products inside a converted model. They are PyTorch's own; the registry of
// recipes is told of them where a recipe may make them again: of those with an operand that has
// one, and of sums of a float32 residual and a branch in 16 bits (saved/residual_sum.cpp).
#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/mul.h>
#include <torch/library.h>

#include <utility>

#include "here.h"
#include "key.h"
#include "savers.h"
#include "taken.h"

namespace memopt::intercept {

namespace {

using at::Tensor;
using c10::DispatchKeySet;

bool is_number(const Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

// Of two tensors that memopt's ops take, none of which is a number, and one of which may have a
// recipe. Most have none, and that is the quickest question.
bool are_operands(const Here& now, const Tensor& self, const Tensor& other) {
  return (now.recipes->may_make(self) || now.recipes->may_make(other)) && !is_number(self) &&
         !is_number(other) && supports(self) && supports(other);
}

autograd::Recipe sum_of(const Tensor& self, const Tensor& other) {
  return {{self, other}, [](const auto& read) { return at::add(read[0], read[1]); }};
}

bool is_residual(const Tensor& residual, const Tensor& branch) {
  return saved::is_residual_sum(residual, branch) && supports(branch) && supports(residual);
}

Tensor add(DispatchKeySet keys, const Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  Tensor sum = at::_ops::add_Tensor::redispatch(below_intercept(keys), self, other, alpha);
  if (!sum.requires_grad() || !alpha.equal(1)) return sum;
  const Here now = here();
  if (!now.functions) return sum;
  const PassOn pass_on;
  if (self.dtype() == other.dtype()) {
    if (are_operands(now, self, other))
      now.recipes->add_made_of(sum, sum_of(self, other), /*is_sum=*/true);
    return sum;
  }
  if (is_residual(self, other)) now.recipes->add_sum(sum, self, other);
  if (is_residual(other, self)) now.recipes->add_sum(sum, other, self);
  return sum;
}

// Whether `other` is a tensor of its own that can be added to `self` in place, and is held for
// backward already: of a sum that is written over nothing else is left.
bool may_add(const Here& now, const Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  return at::GradMode::is_enabled() && self.requires_grad() && !self.is_leaf() && !self.is_view() &&
         alpha.equal(1) && self.dtype() == other.dtype() && are_operands(now, self, other) &&
         self.is_non_overlapping_and_dense() && !self.is_alias_of(other) &&
         at::is_expandable_to(other.sizes(), self.sizes()) && now.recipes->keeps_anyway(other);
}

// What is written over goes on being made by its recipe, for the sum's to read.
Tensor& add_(DispatchKeySet keys, Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  Tensor before;
  const Here now = here();
  if (now.functions && may_add(now, self, other, alpha)) before = now.recipes->stand_in_for(self);
  at::_ops::add__Tensor::redispatch(below_intercept(keys), self, other, alpha);
  if (before.defined()) {
    const PassOn pass_on;
    now.recipes->add_made_of(self, sum_of(before, other), /*is_sum=*/true);
  }
  return self;
}

Tensor mul(DispatchKeySet keys, const Tensor& self, const Tensor& other) {
  Tensor product = mul_of_torch(keys, self, other);
  if (!product.requires_grad()) return product;
  const Here now = here();
  if (now.functions && are_operands(now, self, other)) {
    const PassOn pass_on;
    now.recipes->add_made_of(
        product, {{self, other}, [](const auto& read) { return at::mul(read[0], read[1]); }},
        /*is_sum=*/false);
  }
  return product;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, DeferredInit, m) {
  m.impl("add.Tensor", add);
  m.impl("add_.Tensor", add_);
  m.impl("mul.Tensor", mul);
}

}  // namespace memopt::intercept
