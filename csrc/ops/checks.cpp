#include "checks.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <cmath>

#include "activation.h"
#include "supported.h"

namespace memopt::ops {
namespace {

void check_dense(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), op, ": ", name, " must be a tensor, got None");
  TORCH_CHECK(tensor.layout() == at::kStrided, op, ": ", name,
              " must be a dense (strided) tensor, got layout ", tensor.layout());
}

void check_parameter(const char* op, const char* name, const at::Tensor& parameter,
                     const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                     const char* shape_name) {
  check_dense(op, name, parameter);
  const bool fits = takes_parameter(parameter.scalar_type(), input.scalar_type());
  TORCH_CHECK(fits || input.scalar_type() != at::kDouble, op, ": ", name,
              " must be Double for a Double input, got ", parameter.scalar_type());
  TORCH_CHECK(fits, op, ": ", name, " must have input's dtype ", input.scalar_type(),
              " or Float, got ", parameter.scalar_type());
  TORCH_CHECK(parameter.device() == input.device(), op, ": ", name, " must be on input's device ",
              input.device(), ", got ", parameter.device());
  const c10::SymIntArrayRef sizes = parameter.sym_sizes();
  bool same = sizes.size() == normalized_shape.size();
  for (size_t i = 0; same && i < sizes.size(); ++i) {
    same = TORCH_GUARD_OR_FALSE(sizes[i].sym_eq(normalized_shape[i]));
  }
  TORCH_CHECK(same, op, ": ", name, " must have shape ", normalized_shape, " (", shape_name,
              "), got ", sizes);
}

// A device outside of PyTorch may bring kernels of its own for the private ops.
bool brings_kernels(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return false;
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("memopt::_norm_forward", "");
  return op.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1);
}

}  // namespace

void check_input(const char* op, const char* name, const at::Tensor& tensor) {
  check_dense(op, name, tensor);
  TORCH_CHECK(takes_dtype(tensor.scalar_type()), op, ": ", name,
              " must have dtype float32, float16, bfloat16 or float64, got ", tensor.scalar_type());
  TORCH_CHECK(tensor.is_cpu() || tensor.is_cuda() || tensor.is_meta() || brings_kernels(tensor), op,
              ": ", name, " must be on the CPU or a CUDA device, got ", tensor.device());
}

void check_like_input(const char* op, const char* name, const at::Tensor& tensor,
                      const at::Tensor& input) {
  check_like(op, name, tensor, "input", input);
}

namespace {

void check_like_but_shape(const char* op, const char* name, const at::Tensor& tensor,
                          const char* like_name, const at::Tensor& like) {
  check_dense(op, name, tensor);
  TORCH_CHECK(tensor.scalar_type() == like.scalar_type(), op, ": ", name, " must have ", like_name,
              "'s dtype ", like.scalar_type(), ", got ", tensor.scalar_type());
  TORCH_CHECK(tensor.device() == like.device(), op, ": ", name, " must be on ", like_name,
              "'s device ", like.device(), ", got ", tensor.device());
}

}  // namespace

void check_like(const char* op, const char* name, const at::Tensor& tensor, const char* like_name,
                const at::Tensor& like, c10::SymIntArrayRef sizes) {
  check_like_but_shape(op, name, tensor, like_name, like);
  TORCH_CHECK(tensor.sym_sizes().equals(sizes), op, ": ", name, " must have shape ", sizes,
              ", got ", tensor.sym_sizes());
}

void check_like(const char* op, const char* name, const at::Tensor& tensor, const char* like_name,
                const at::Tensor& like) {
  check_like_but_shape(op, name, tensor, like_name, like);
  TORCH_CHECK(tensor.sym_sizes().equals(like.sym_sizes()), op, ": ", name, " must have ", like_name,
              "'s shape ", like.sym_sizes(), ", got ", tensor.sym_sizes());
}

void check_contiguous(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_contiguous(), op, ": ", name,
              " must be contiguous where results are written over it, got strides ",
              tensor.sym_strides());
}

void check_normalized_shape(const char* op, const at::Tensor& input,
                            c10::SymIntArrayRef normalized_shape) {
  TORCH_CHECK(!normalized_shape.empty(), op,
              ": normalized_shape must have at least one dimension, got []");
  const c10::SymIntArrayRef sizes = input.sym_sizes();
  const size_t n = normalized_shape.size();
  bool same = sizes.size() >= n;
  for (size_t i = 0; i < n; ++i) {
    TORCH_CHECK(TORCH_GUARD_OR_TRUE(normalized_shape[i].sym_gt(0)), op,
                ": normalized_shape must be positive in every dimension, got ", normalized_shape);
    same = same && TORCH_GUARD_OR_FALSE(normalized_shape[i].sym_eq(sizes[sizes.size() - n + i]));
  }
  TORCH_CHECK(same, op, ": normalized_shape must be the last dimensions of input's shape ", sizes,
              ", got ", normalized_shape);
}

void check_parameters(const char* op, const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                      const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, std::array<const char*, 2> names,
                      const char* shape_name) {
  const bool has_weight = weight.has_value() && weight->defined();
  const bool has_bias = bias.has_value() && bias->defined();
  if (has_weight) check_parameter(op, names[0], *weight, input, normalized_shape, shape_name);
  if (has_bias) check_parameter(op, names[1], *bias, input, normalized_shape, shape_name);
  TORCH_CHECK(!has_weight || !has_bias || weight->scalar_type() == bias->scalar_type(), op, ": ",
              names[1], " must have ", names[0], "'s dtype ", weight->scalar_type(), ", got ",
              bias->scalar_type());
}

void check_channels(const char* op, const at::Tensor& input, int64_t num_groups) {
  check_input(op, "input", input);
  TORCH_CHECK(input.dim() >= 2, op,
              ": input must have at least 2 dimensions (batch, channels), got shape ",
              input.sym_sizes());
  TORCH_CHECK(num_groups >= 1, op, ": num_groups must be positive, got ", num_groups);
  TORCH_CHECK(TORCH_GUARD_OR_TRUE((input.sym_size(1) % num_groups).sym_eq(0)), op,
              ": num_groups must divide the number of channels ", input.sym_size(1), ", got ",
              num_groups);
}

bool takes_eps(double eps) {
  return std::isfinite(eps) && eps >= 0.0;
}

void check_eps(const char* op, double eps) {
  TORCH_CHECK(takes_eps(eps), op, ": eps must be finite and not negative, got ", eps);
}

std::string gelu_name(const char* op, std::string_view approximate) {
  if (approximate == "none") return "gelu";
  TORCH_CHECK(approximate == "tanh", op, ": approximate must be 'none' or 'tanh', got '",
              approximate, "'");
  return "gelu_tanh";
}

void check_activation(const char* op, std::string_view activation, std::optional<double> scalar) {
  parse_activation(op, activation, scalar);
}

}  // namespace memopt::ops
