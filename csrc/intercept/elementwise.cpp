// PyTorch's sums, differences, products, quotients, powers and maxima inside a converted model.
// They are PyTorch's own; the registry of recipes is told of them where a recipe may make them
// again: of those with an operand that has one, of those whose own node saves the operands, and of
// sums of a float32 residual and a branch in 16 bits (saved/residual_sum.cpp). Rotary embedding
// behind a norm of queries and keys is made of these: attention keeps what the norms keep, and the
// cosines and sines. So are StarReLU, which keeps what it squares, EvoNorm and FRN, which keep
// their input.
#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/div.h>
#include <ATen/ops/maximum_ops.h>
#include <ATen/ops/minimum_ops.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/neg_ops.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rsub_ops.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/sub_ops.h>
#include <torch/library.h>

#include <utility>

#include "here.h"
#include "key.h"
#include "made_of.h"
#include "part.h"
#include "savers.h"
#include "taken.h"

namespace memopt::intercept {

namespace {

using at::Tensor;
using c10::DispatchKeySet;

bool is_number(const Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

// What the op's node saves: nothing, or of two tensors each where the other's gradient is wanted.
enum class Saves { kNothing, kOperands };

// Of two tensors that memopt's ops take, none of which is a number.
bool are_tensors(const Tensor& self, const Tensor& other) {
  return !is_number(self) && !is_number(other) && supports(self) && supports(other);
}

// Most have no recipe, and that is the quickest question.
bool may_make(const Here& now, const Tensor& self, const Tensor& other) {
  return now.recipes->may_make(self) || now.recipes->may_make(other);
}

template <class Run>
autograd::Recipe of_both(const Tensor& self, const Tensor& other, Run run) {
  const Part one = part_of_parameter(self), two = part_of_parameter(other);
  return {{one.whole, two.whole},
          [one = one.without_memory(), two = two.without_memory(), run](const auto& read) {
            return run(one.of(read[0]), two.of(read[1]));
          }};
}

// Tells the registry of a result of PyTorch's, where one of the operands may have a recipe or both
// are saved. With a number it is made of the other one alone.
template <class Run>
void note(const Tensor& result, const Tensor& self, const Tensor& other, Saves saves, Run run) {
  if (is_number(other)) {
    note_made_of(result, self, [&]() -> autograd::Recipe {
      return {{self}, [other, run](const auto& read) { return run(read[0], other); }};
    });
    return;
  }
  if (!result.requires_grad()) return;
  const Here now = here();
  if (!now.functions) return;
  const bool are_saved = saves == Saves::kOperands && self.requires_grad() && other.requires_grad();
  if ((!are_saved && !may_make(now, self, other)) || !are_tensors(self, other)) return;
  const PassOn pass_on;
  if (are_saved) return now.recipes->add_made_of_kept(result, of_both(self, other, run));
  now.recipes->add_made_of(result, of_both(self, other, run), saves == Saves::kNothing);
}

Tensor plus(const Tensor& self, const Tensor& other) {
  return at::add(self, other);
}

bool are_alike(const Tensor& self, const Tensor& other) {
  return self.dtype() == other.dtype() || is_number(other);
}

bool is_residual(const Tensor& residual, const Tensor& branch) {
  return saved::is_residual_sum(residual, branch) && supports(branch) && supports(residual);
}

Tensor add(DispatchKeySet keys, const Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  Tensor sum = at::_ops::add_Tensor::redispatch(below_intercept(keys), self, other, alpha);
  if (!sum.requires_grad() || !alpha.equal(1)) return sum;
  if (are_alike(self, other)) {
    note(sum, self, other, Saves::kNothing, plus);
    return sum;
  }
  const Here now = here();
  if (!now.functions) return sum;
  const PassOn pass_on;
  if (is_residual(self, other)) now.recipes->add_sum(sum, self, other);
  if (is_residual(other, self)) now.recipes->add_sum(sum, other, self);
  return sum;
}

Tensor sub(DispatchKeySet keys, const Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  Tensor difference = at::_ops::sub_Tensor::redispatch(below_intercept(keys), self, other, alpha);
  if (!alpha.equal(1) || !are_alike(self, other)) return difference;
  note(difference, self, other, Saves::kNothing,
       [](const Tensor& from, const Tensor& what) { return at::sub(from, what); });
  return difference;
}

// Whether `other` is a tensor of its own that can be added to `self` in place, and is held for
// backward already: of a sum that is written over nothing else is left.
bool may_add(const Here& now, const Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  return at::GradMode::is_enabled() && self.requires_grad() && !self.is_leaf() && !self.is_view() &&
         alpha.equal(1) && self.dtype() == other.dtype() && may_make(now, self, other) &&
         are_tensors(self, other) && self.is_non_overlapping_and_dense() &&
         !self.is_alias_of(other) && at::is_expandable_to(other.sizes(), self.sizes()) &&
         now.recipes->keeps_anyway(other);
}

// What is written over goes on being made by its recipe, for the sum's to read.
Tensor& add_(DispatchKeySet keys, Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  Tensor before;
  const Here now = here();
  if (now.functions && may_add(now, self, other, alpha)) before = now.recipes->stand_in_for(self);
  at::_ops::add__Tensor::redispatch(below_intercept(keys), self, other, alpha);
  if (before.defined()) {
    const PassOn pass_on;
    now.recipes->add_made_of(self, of_both(before, other, plus), /*is_sum=*/true);
  }
  return self;
}

Tensor mul(DispatchKeySet keys, const Tensor& self, const Tensor& other) {
  Tensor product = mul_of_torch(keys, self, other);
  note(product, self, other, Saves::kOperands,
       [](const Tensor& one, const Tensor& by) { return at::mul(one, by); });
  return product;
}

Tensor div(DispatchKeySet keys, const Tensor& self, const Tensor& other) {
  Tensor quotient = div_of_torch(keys, self, other);
  note(quotient, self, other, Saves::kOperands,
       [](const Tensor& one, const Tensor& by) { return at::div(one, by); });
  return quotient;
}

// Op: at::_ops::maximum or minimum.
template <class Op>
Tensor extremum(DispatchKeySet keys, const Tensor& self, const Tensor& other) {
  Tensor result = Op::redispatch(below_intercept(keys), self, other);
  note(result, self, other, Saves::kOperands,
       [](const Tensor& one, const Tensor& than) { return Op::call(one, than); });
  return result;
}

// Powers that ATen makes of products, quotients and roots; others take it ten times as long as an
// activation.
bool is_cheap(const at::Scalar& exponent) {
  for (const double cheap : {2., 3., .5, -.5, -1., -2.}) {
    if (exponent.equal(cheap)) return true;
  }
  return false;
}

// Its node saves the input. (Autocast may have computed it in another type.)
Tensor pow(DispatchKeySet keys, const Tensor& self, const at::Scalar& exponent) {
  Tensor power = pow_of_torch(keys, self, exponent);
  if (!power.requires_grad() || !is_cheap(exponent) || power.dtype() != self.dtype()) return power;
  const Here now = here();
  if (!now.functions || !supports(self)) return power;
  const PassOn pass_on;
  now.recipes->add_made_of_kept(
      power, {{self}, [exponent](const auto& read) { return at::pow(read[0], exponent); }});
  return power;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, DeferredInit, m) {
  m.impl("add.Tensor", add);
  m.impl("add_.Tensor", add_);
  m.impl("sub.Tensor", sub);
  m.impl("mul.Tensor", mul);
  m.impl("div.Tensor", div);
  m.impl("maximum", extremum<at::_ops::maximum>);
  m.impl("minimum", extremum<at::_ops::minimum>);
  m.impl("pow.Tensor_Scalar", pow);
  MEMOPT_MADE_OF(neg)
  m.impl("rsub.Scalar", TORCH_FN((MadeOf<at::_ops::rsub_Scalar>::Call::call)));
}

}  // namespace memopt::intercept
