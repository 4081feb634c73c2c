// The public ops with an RMSNorm in them.
#include "declare.h"
#include "norm.h"

namespace memopt::autograd {
namespace {

using TwoTensors = std::tuple<Tensor, Tensor>;
using Eps = std::optional<double>;

Tensor rms_norm(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                const OptionalTensor& weight, Eps eps, bool zero_centered_weight) {
  return run_norm(
      "rms_norm",
      {.kind = ops::NormKind::kRmsNorm, .eps = eps, .zero_centered_weight = zero_centered_weight},
      input, normalized_shape, weight, std::nullopt);
}

TwoTensors add_rms_norm(const Tensor& input, const Tensor& residual,
                        c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight, Eps eps,
                        bool zero_centered_weight) {
  return run_add_norm(
      "add_rms_norm",
      {.kind = ops::NormKind::kRmsNorm, .eps = eps, .zero_centered_weight = zero_centered_weight},
      input, residual, normalized_shape, weight, std::nullopt);
}

TwoTensors dropout_add_rms_norm(const Tensor& input, const Tensor& residual, double p,
                                c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                Eps eps, bool zero_centered_weight) {
  return run_add_norm("dropout_add_rms_norm",
                      {.kind = ops::NormKind::kRmsNorm,
                       .eps = eps,
                       .zero_centered_weight = zero_centered_weight,
                       .drops = true,
                       .p = p},
                      input, residual, normalized_shape, weight, std::nullopt);
}

std::vector<Tensor> rms_norm_linear(const Tensor& input, const OptionalTensor& norm_weight,
                                    at::TensorList weights, const c10::List<OptionalTensor>& biases,
                                    Eps eps, bool zero_centered_weight) {
  return run_norm_linear(
      "rms_norm_linear",
      {.kind = ops::NormKind::kRmsNorm, .eps = eps, .zero_centered_weight = zero_centered_weight},
      input, norm_weight, std::nullopt, weights, biases);
}

std::vector<Tensor> batched_rms_norm_linear(const Tensor& input, const OptionalTensor& norm_weight,
                                            at::TensorList weights,
                                            const c10::List<OptionalTensor>& biases, Eps eps,
                                            bool zero_centered_weight) {
  static const auto norm =
      find_op<Tensor(const Tensor&, c10::SymIntArrayRef, const OptionalTensor&, Eps, bool)>(
          "memopt::rms_norm");
  const Tensor normed =
      norm.call(input, input.sym_size(-1), norm_weight, eps, zero_centered_weight);
  return batched_linears(normed, weights, biases);
}

const Autocast kRmsNorm{AutocastTo::kWidest, {"weight"}};
const Autocast kRmsNormLinear{AutocastTo::kLow, {"norm_weight"}};

MEMOPT_DECLARE(rms_norm, kRmsNorm, {},
               R"(rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None,
                  float? eps=None, *, bool zero_centered_weight=False) -> Tensor)");
MEMOPT_DECLARE(add_rms_norm, kRmsNorm, {},
               R"(add_rms_norm(Tensor input, Tensor residual, SymInt[] normalized_shape,
                  Tensor? weight=None, float? eps=None, *, bool zero_centered_weight=False)
                  -> (Tensor output, Tensor sum))");
MEMOPT_DECLARE(dropout_add_rms_norm, kRmsNorm, kDrawsRandomNumbers,
               R"(dropout_add_rms_norm(Tensor input, Tensor residual, float p,
                  SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, *,
                  bool zero_centered_weight=False) -> (Tensor output, Tensor sum))");
MEMOPT_DECLARE(rms_norm_linear, kRmsNormLinear, {},
               R"(rms_norm_linear(Tensor input, Tensor? norm_weight, Tensor[] weights,
                  Tensor?[] biases, float? eps=None, *, bool zero_centered_weight=False)
                  -> Tensor[])");

}  // namespace

TORCH_LIBRARY_IMPL(memopt, FuncTorchBatchedDecomposition, m) {
  m.impl("rms_norm_linear", batched_rms_norm_linear);
}

}  // namespace memopt::autograd
