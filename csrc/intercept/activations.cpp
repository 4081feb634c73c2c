// PyTorch's activations inside a converted model, and those that write over their input:
// functions.h.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/elu_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/hardsigmoid_ops.h>
#include <ATen/ops/hardswish_ops.h>
#include <ATen/ops/hardtanh_ops.h>
#include <ATen/ops/leaky_relu_ops.h>
#include <ATen/ops/mish_ops.h>
#include <ATen/ops/relu_ops.h>
#include <ATen/ops/sigmoid_ops.h>
#include <ATen/ops/silu_ops.h>
#include <torch/library.h>

#include <cmath>
#include <optional>
#include <string_view>

#include "../autograd/support.h"
#include "functions.h"
#include "here.h"
#include "key.h"
#include "savers.h"
#include "taken.h"

namespace memopt::intercept {

namespace {

using at::Scalar;
using at::Tensor;
using c10::DispatchKeySet;
using std::string_view;
using OfActivation = std::optional<double>;

Tensor activation(const Tensor& input, string_view name, OfActivation scalar = std::nullopt) {
  static const auto op =
      autograd::find_op<Tensor(const Tensor&, string_view, OfActivation)>("memopt::activation");
  const PassOn pass_on;
  // PyTorch's autocast leaves these functions the dtype of their input.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return op.call(input, name, scalar);
}

bool are_ours_with(const Tensor& self) {
  return are_ours() && supports(self);
}

// The number of an activation of memopt's, which takes positive ones.
OfActivation positive(const Scalar& scalar) {
  if (scalar.isComplex() || scalar.isSymbolic()) return std::nullopt;
  const auto number = scalar.toDouble();
  return number > 0 && std::isfinite(number) ? OfActivation(number) : std::nullopt;
}

bool is_plain_elu(const Scalar& alpha, const Scalar& scale, const Scalar& input_scale) {
  return positive(alpha).has_value() && scale.equal(1) && input_scale.equal(1);
}

bool is_relu6(const Scalar& min, const Scalar& max) {
  return min.equal(0) && max.equal(6);
}

Tensor gelu(DispatchKeySet keys, const Tensor& self, string_view approximate) {
  const bool known = approximate == "none" || approximate == "tanh";
  if (!known || !are_ours_with(self)) return gelu_of_torch(keys, self, approximate);
  return activation(self, approximate == "tanh" ? "gelu_tanh" : "gelu");
}

Tensor silu(DispatchKeySet keys, const Tensor& self) {
  return are_ours_with(self) ? activation(self, "silu") : silu_of_torch(keys, self);
}

// relu and sigmoid: see is_kept_anyway().
Tensor relu(DispatchKeySet keys, const Tensor& self) {
  const bool ours = are_wanted_anywhere() || (here().functions && is_kept_anyway(self));
  return ours && supports(self) ? activation(self, "relu") : relu_of_torch(keys, self);
}

Tensor sigmoid(DispatchKeySet keys, const Tensor& self) {
  const bool ours = here().functions && is_kept_anyway(self) && supports(self);
  return ours ? activation(self, "sigmoid") : sigmoid_of_torch(keys, self);
}

Tensor hardtanh(DispatchKeySet keys, const Tensor& self, const Scalar& min, const Scalar& max) {
  if (is_relu6(min, max) && are_ours_with(self)) return activation(self, "relu6");
  return at::_ops::hardtanh::redispatch(below_intercept(keys), self, min, max);
}

Tensor leaky_relu(DispatchKeySet keys, const Tensor& self, const Scalar& slope) {
  const auto number = positive(slope);
  if (number.has_value() && are_ours_with(self)) return activation(self, "leaky_relu", number);
  return at::_ops::leaky_relu::redispatch(below_intercept(keys), self, slope);
}

Tensor elu(DispatchKeySet keys, const Tensor& self, const Scalar& alpha, const Scalar& scale,
           const Scalar& input_scale) {
  if (is_plain_elu(alpha, scale, input_scale) && are_ours_with(self))
    return activation(self, "elu", positive(alpha));
  return at::_ops::elu::redispatch(below_intercept(keys), self, alpha, scale, input_scale);
}

// Those without arguments.
template <class Op, const char* const& kName>
Tensor out_of_place(DispatchKeySet keys, const Tensor& self) {
  if (are_ours_with(self)) return activation(self, kName);
  return Op::redispatch(below_intercept(keys), self);
}

// Over its input where that is a tensor of a graph; else it is PyTorch's to do, or to refuse.
bool is_over(const Tensor& self, string_view name, OfActivation scalar = std::nullopt) {
  const bool ours = here().functions && at::GradMode::is_enabled() && supports(self) &&
                    self.requires_grad() && !self.is_leaf() && !self.is_view() &&
                    self.is_non_overlapping_and_dense();
  if (!ours) return false;
  static const auto op =
      autograd::find_op<void(const Tensor&, string_view, OfActivation)>("memopt::activation_");
  const PassOn pass_on;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  op.call(self, name, scalar);
  return true;
}

template <class Op, const char* const& kName>
Tensor& in_place(DispatchKeySet keys, Tensor& self) {
  return is_over(self, kName) ? self : Op::redispatch(below_intercept(keys), self);
}

Tensor& gelu_(DispatchKeySet keys, Tensor& self, string_view approximate) {
  const bool known = approximate == "none" || approximate == "tanh";
  if (known && is_over(self, approximate == "tanh" ? "gelu_tanh" : "gelu")) return self;
  return at::_ops::gelu_::redispatch(below_intercept(keys), self, approximate);
}

Tensor& hardtanh_(DispatchKeySet keys, Tensor& self, const Scalar& min, const Scalar& max) {
  if (is_relu6(min, max) && is_over(self, "relu6")) return self;
  return at::_ops::hardtanh_::redispatch(below_intercept(keys), self, min, max);
}

Tensor& leaky_relu_(DispatchKeySet keys, Tensor& self, const Scalar& slope) {
  const auto number = positive(slope);
  if (number.has_value() && is_over(self, "leaky_relu", number)) return self;
  return at::_ops::leaky_relu_::redispatch(below_intercept(keys), self, slope);
}

Tensor& elu_(DispatchKeySet keys, Tensor& self, const Scalar& alpha, const Scalar& scale,
             const Scalar& input_scale) {
  if (is_plain_elu(alpha, scale, input_scale) && is_over(self, "elu", positive(alpha))) return self;
  return at::_ops::elu_::redispatch(below_intercept(keys), self, alpha, scale, input_scale);
}

constexpr const char* kSilu = "silu";
constexpr const char* kRelu = "relu";
constexpr const char* kSigmoid = "sigmoid";
constexpr const char* kHardsigmoid = "hardsigmoid";
constexpr const char* kHardswish = "hardswish";
constexpr const char* kMish = "mish";

}  // namespace

TORCH_LIBRARY_IMPL(aten, DeferredInit, m) {
  m.impl("gelu", gelu);
  m.impl("silu", silu);
  m.impl("relu", relu);
  m.impl("sigmoid", sigmoid);
  m.impl("hardtanh", hardtanh);
  m.impl("leaky_relu", leaky_relu);
  m.impl("elu", elu);
  m.impl("hardsigmoid", TORCH_FN((out_of_place<at::_ops::hardsigmoid, kHardsigmoid>)));
  m.impl("hardswish", TORCH_FN((out_of_place<at::_ops::hardswish, kHardswish>)));
  m.impl("mish", TORCH_FN((out_of_place<at::_ops::mish, kMish>)));
  m.impl("gelu_", gelu_);
  m.impl("silu_", TORCH_FN((in_place<at::_ops::silu_, kSilu>)));
  m.impl("relu_", TORCH_FN((in_place<at::_ops::relu_, kRelu>)));
  m.impl("sigmoid_", TORCH_FN((in_place<at::_ops::sigmoid_, kSigmoid>)));
  m.impl("hardtanh_", hardtanh_);
  m.impl("leaky_relu_", leaky_relu_);
  m.impl("elu_", elu_);
  m.impl("hardsigmoid_", TORCH_FN((in_place<at::_ops::hardsigmoid_, kHardsigmoid>)));
  m.impl("hardswish_", TORCH_FN((in_place<at::_ops::hardswish_, kHardswish>)));
  m.impl("mish_", TORCH_FN((in_place<at::_ops::mish_, kMish>)));
}

}  // namespace memopt::intercept
