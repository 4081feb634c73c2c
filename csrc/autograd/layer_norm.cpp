// The public ops with a LayerNorm in them.
#include <string_view>

#include "../ops/checks.h"
#include "declare.h"
#include "norm.h"

namespace memopt::autograd {
namespace {

using TwoTensors = std::tuple<Tensor, Tensor>;

Tensor layer_norm(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                  const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  return run_norm("layer_norm", {.eps = eps}, input, normalized_shape, weight, bias);
}

Tensor layer_norm_gelu(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                       const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                       std::string_view approximate) {
  return run_norm("layer_norm_gelu",
                  {.eps = eps, .activation = ops::gelu_name("layer_norm_gelu", approximate)}, input,
                  normalized_shape, weight, bias);
}

TwoTensors add_layer_norm(const Tensor& input, const Tensor& residual,
                          c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                          const OptionalTensor& bias, double eps) {
  return run_add_norm("add_layer_norm", {.eps = eps}, input, residual, normalized_shape, weight,
                      bias);
}

TwoTensors dropout_add_layer_norm(const Tensor& input, const Tensor& residual, double p,
                                  c10::SymIntArrayRef normalized_shape,
                                  const OptionalTensor& weight, const OptionalTensor& bias,
                                  double eps) {
  return run_add_norm("dropout_add_layer_norm", {.eps = eps, .drops = true, .p = p}, input,
                      residual, normalized_shape, weight, bias);
}

std::vector<Tensor> layer_norm_linear(const Tensor& input, const OptionalTensor& norm_weight,
                                      const OptionalTensor& norm_bias, at::TensorList weights,
                                      const c10::List<OptionalTensor>& biases, double eps) {
  return run_norm_linear("layer_norm_linear", {.eps = eps}, input, norm_weight, norm_bias, weights,
                         biases);
}

std::vector<Tensor> batched_layer_norm_linear(const Tensor& input,
                                              const OptionalTensor& norm_weight,
                                              const OptionalTensor& norm_bias,
                                              at::TensorList weights,
                                              const c10::List<OptionalTensor>& biases, double eps) {
  static const auto norm = find_op<Tensor(const Tensor&, c10::SymIntArrayRef, const OptionalTensor&,
                                          const OptionalTensor&, double)>("memopt::layer_norm");
  const Tensor normed = norm.call(input, input.sym_size(-1), norm_weight, norm_bias, eps);
  return batched_linears(normed, weights, biases);
}

const Autocast kNorm{AutocastTo::kWidest, {"weight", "bias"}};
const Autocast kNormLinear{AutocastTo::kLow, {"norm_weight", "norm_bias"}};

MEMOPT_DECLARE(layer_norm, kNorm, {},
               R"(layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None,
                  Tensor? bias=None, float eps=1e-05) -> Tensor)");
MEMOPT_DECLARE(layer_norm_gelu, kNorm, {},
               R"(layer_norm_gelu(Tensor input, SymInt[] normalized_shape, Tensor? weight=None,
                  Tensor? bias=None, float eps=1e-05, *, str approximate="none") -> Tensor)");
MEMOPT_DECLARE(add_layer_norm, kNorm, {},
               R"(add_layer_norm(Tensor input, Tensor residual, SymInt[] normalized_shape,
                  Tensor? weight=None, Tensor? bias=None, float eps=1e-05)
                  -> (Tensor output, Tensor sum))");
MEMOPT_DECLARE(dropout_add_layer_norm, kNorm, kDrawsRandomNumbers,
               R"(dropout_add_layer_norm(Tensor input, Tensor residual, float p,
                  SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None,
                  float eps=1e-05) -> (Tensor output, Tensor sum))");
MEMOPT_DECLARE(layer_norm_linear, kNormLinear, {},
               R"(layer_norm_linear(Tensor input, Tensor? norm_weight, Tensor? norm_bias,
                  Tensor[] weights, Tensor?[] biases, float eps=1e-05) -> Tensor[])");

}  // namespace

TORCH_LIBRARY_IMPL(memopt, FuncTorchBatchedDecomposition, m) {
  m.impl("layer_norm_linear", batched_layer_norm_linear);
}

}  // namespace memopt::autograd
