#include "norm.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "activation.h"
#include "checks.h"
#include "layout.h"
#include "tensors.h"

namespace memopt::ops {

using at::Tensor;
using kernels::NormKind;

namespace {

// The name of the public op, as in errors.
const char* norm_op_name(bool rms, bool activates, bool adds, bool drops, bool backward) {
  if (activates) return backward ? "layer_norm_gelu backward" : "layer_norm_gelu";
  if (drops && rms) return backward ? "dropout_add_rms_norm backward" : "dropout_add_rms_norm";
  if (drops) return backward ? "dropout_add_layer_norm backward" : "dropout_add_layer_norm";
  if (adds && rms) return backward ? "add_rms_norm backward" : "add_rms_norm";
  if (adds) return backward ? "add_layer_norm backward" : "add_layer_norm";
  if (rms) return backward ? "rms_norm backward" : "rms_norm";
  return backward ? "layer_norm backward" : "layer_norm";
}

}  // namespace

Norm parse_norm(std::string_view norm, bool zero_centered,
                std::optional<std::string_view> activation, InFront front, bool backward) {
  TORCH_CHECK(norm == "layer_norm" || norm == "rms_norm",
              "norm must be 'layer_norm' or 'rms_norm', got '", norm, "'");
  const bool rms = norm == "rms_norm";
  const char* op = norm_op_name(rms, activation.has_value(), front.adds, front.drops, backward);
  Norm parsed{rms ? NormKind::kRmsNorm : NormKind::kLayerNorm,
              zero_centered,
              {kernels::Activation::kIdentity, 0.0},
              op};
  if (activation.has_value()) {
    parsed.activation = parse_activation(op, *activation, std::nullopt);
    TORCH_CHECK(kernels::is_norm(parsed.kind, parsed.activation.kind, front.adds), op,
                ": activation behind a ", norm,
                " must be 'gelu' or 'gelu_tanh' behind a "
                "layer_norm without a residual, got '",
                *activation, "'");
  }
  return parsed;
}

void check_norm(const Norm& norm, const NormArguments& a) {
  check_input(norm.op, "input", a.v);
  TORCH_CHECK(a.normalized_dims >= 1 && a.normalized_dims <= a.v.dim(), norm.op,
              ": normalized_shape must be some of input's last dimensions, got ", a.normalized_dims,
              " of ", a.v.dim());
  check_normalized_shape(norm.op, a.v, a.row());
  check_parameters(norm.op, a.v, a.row(), a.weight, a.bias);
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

const void* parameter_data(const Norm& norm, const char* name, const Tensor& parameter) {
  const void* data = const_data(parameter);
  TORCH_CHECK(!parameter.defined() || data != nullptr, norm.op, ": ", name,
              " must be in memory, got one whose storage was freed");
  return data;
}

kernels::ScalarType parameter_type(const Tensor& weight, const Tensor& bias, const Tensor& v) {
  return scalar_type(weight.defined() ? weight : bias.defined() ? bias : v);
}

}  // namespace memopt::ops
