// The rules that arguments must keep, one function each. A message names the op, the rule and what
// was got:
//   layer_norm: weight must have shape [768] (normalized_shape), got [512]
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>

namespace memopt::ops {

// A dense floating-point tensor (float32, float16, bfloat16, float64) on the CPU, a CUDA device or
// meta.
void check_input(const char* op, const char* name, const at::Tensor& tensor);

// Same shape, dtype and device as input.
void check_like_input(const char* op, const char* name, const at::Tensor& tensor,
                      const at::Tensor& input);

// Dtype and device of another argument, which `like_name` names, and its shape or `sizes`.
void check_like(const char* op, const char* name, const at::Tensor& tensor, const char* like_name,
                const at::Tensor& like);
void check_like(const char* op, const char* name, const at::Tensor& tensor, const char* like_name,
                const at::Tensor& like, c10::SymIntArrayRef sizes);

// What an op that writes over its argument asks for.
void check_contiguous(const char* op, const char* name, const at::Tensor& tensor);

// At least one dimension, none of them zero, equal to input's last ones.
void check_normalized_shape(const char* op, const at::Tensor& input,
                            c10::SymIntArrayRef normalized_shape);

// weight and bias: shape normalized_shape, input's dtype or float32 and the same for both, input's
// device. `names` are theirs, and `shape_name` the shape's, in errors.
void check_parameters(const char* op, const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                      const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias,
                      std::array<const char*, 2> names = {"weight", "bias"},
                      const char* shape_name = "normalized_shape");

// Of a norm over channels: input is (batch, channels, *), and num_groups divides channels.
void check_channels(const char* op, const at::Tensor& input, int64_t num_groups);

// Finite and not negative: PyTorch's norms take others too.
bool takes_eps(double eps);
void check_eps(const char* op, double eps);

// A name in kernels/activation.h, and a scalar where that activation takes one and nowhere else.
void check_activation(const char* op, std::string_view activation, std::optional<double> scalar);

// The name of GELU's form for approximate="none" or "tanh".
std::string gelu_name(const char* op, std::string_view approximate);

}  // namespace memopt::ops
