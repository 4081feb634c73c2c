// What forward and backward of the norms share below autograd: LayerNorm and RMSNorm, with what
// stands in front of them and behind them (kernels/norm.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "norm_kind.h"

namespace memopt::ops {

using OptionalTensor = std::optional<at::Tensor>;

struct Norm {
  NormKind kind;
  bool zero_centered;
  kernels::ActivationSpec activation;
  std::string name_of_op;

  const char* op() const { return name_of_op.c_str(); }  // in errors: what a user calls
  bool is_layer_norm() const { return kind == NormKind::kLayerNorm; }
};

struct InFront {
  bool adds = false;  // a residual
  bool drops = false;
};

// The arguments of the private ops. An error names the op that has this kind and these parts.
Norm parse_norm(std::string_view name, bool zero_centered,
                std::optional<std::string_view> activation, InFront front, bool backward);

// v, a matrix whose rows are normalised, and the parameters.
struct NormArguments {
  const at::Tensor& v;
  int64_t normalized_dims;
  const OptionalTensor& weight;
  const OptionalTensor& bias;

  c10::SymIntArrayRef row() const {
    return v.sym_sizes().slice(static_cast<size_t>(v.dim() - normalized_dims));
  }
  // Not for tensors with symbolic sizes.
  int64_t cols() const {
    return c10::multiply_integers(v.sizes().slice(static_cast<size_t>(v.dim() - normalized_dims)));
  }
};

void check_norm(const Norm& norm, const NormArguments& arguments);

// Input's leading dimensions, then a one for each normalised one: as torch.native_layer_norm shapes
// them.
c10::SymDimVector statistics_shape(const NormArguments& arguments);

// Like v, uninitialised; undefined where it is not wanted. Contiguous, as PyTorch's layer_norm has
// it; its rms_norm keeps channels-last. `decides` is v, or beside it a gradient.
at::Tensor empty_like_v(const Norm& norm, const NormArguments& arguments, bool wanted,
                        const at::Tensor& decides);

kernels::ScalarType parameter_type(const at::Tensor& weight, const at::Tensor& bias,
                                   const at::Tensor& v);

}  // namespace memopt::ops
