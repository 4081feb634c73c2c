#include "norm.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <string>

#include "activation.h"
#include "checks.h"
#include "layout.h"
#include "tensors.h"

namespace memopt::ops {

using at::Tensor;

namespace {

// The name of the public op, as in errors.
std::string name_of_op(const char* norm, bool activates, InFront front, bool backward) {
  const char* in_front = front.drops ? "dropout_add_" : front.adds ? "add_" : "";
  return std::string(in_front) + norm + (activates ? "_gelu" : "") + (backward ? " backward" : "");
}

}  // namespace

Norm parse_norm(std::string_view name, bool zero_centered,
                std::optional<std::string_view> activation, InFront front, bool backward) {
  const auto kind = norm_kind(name);
  TORCH_CHECK(kind.has_value(), "norm must be 'layer_norm' or 'rms_norm', got '", name, "'");
  Norm norm{*kind,
            zero_centered,
            {kernels::Activation::kIdentity, 0.0},
            name_of_op(name_of(*kind), activation.has_value(), front, backward)};
  if (activation.has_value()) {
    norm.activation = parse_activation(norm.op(), *activation, std::nullopt);
    TORCH_CHECK(kernels::is_norm(norm.kind, norm.activation.kind, front.adds), norm.op(),
                ": activation behind a ", name,
                " must be 'gelu' or 'gelu_tanh' behind a "
                "layer_norm without a residual, got '",
                *activation, "'");
  }
  return norm;
}

void check_norm(const Norm& norm, const NormArguments& a) {
  check_input(norm.op(), "input", a.v);
  TORCH_CHECK(a.normalized_dims >= 1 && a.normalized_dims <= a.v.dim(), norm.op(),
              ": normalized_shape must be some of input's last dimensions, got ", a.normalized_dims,
              " of ", a.v.dim());
  check_normalized_shape(norm.op(), a.v, a.row());
  check_parameters(norm.op(), a.v, a.row(), a.weight, a.bias);
}

c10::SymDimVector statistics_shape(const NormArguments& a) {
  c10::SymDimVector shape(a.v.sym_sizes().begin(), a.v.sym_sizes().end());
  std::fill(shape.end() - a.normalized_dims, shape.end(), c10::SymInt(1));
  return shape;
}

Tensor empty_like_v(const Norm& norm, const NormArguments& a, bool wanted, const Tensor& decides) {
  if (!wanted) return Tensor();
  if (!norm.is_layer_norm() && is_channels_last(a.v) && is_channels_last(decides)) {
    return empty_elementwise(a.v);
  }
  return at::empty_symint(a.v.sym_sizes(), a.v.options());
}

kernels::ScalarType parameter_type(const Tensor& weight, const Tensor& bias, const Tensor& v) {
  return scalar_type(weight.defined() ? weight : bias.defined() ? bias : v);
}

}  // namespace memopt::ops
