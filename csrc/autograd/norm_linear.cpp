// layer_norm_linear and rms_norm_linear: one norm in front of one or several linears (separate
// query, key and value projections, say).
//
// Saved: the norm's input, 2 bytes an element in bfloat16, and 8 bytes a row (RMSNorm: 4). Eager
// PyTorch saves the norm's output as well, 2 bytes an element. Backward: linears.h.
#include <torch/library.h>

#include "linears.h"
#include "norm_producers.h"

namespace memopt::autograd {
namespace {

variable_list values_or_undefined(const c10::List<OptionalTensor>& list) {
  variable_list values;
  for (const auto& entry : list) {
    values.push_back(value_or_undefined(static_cast<OptionalTensor>(entry)));
  }
  return values;
}

std::vector<Tensor> layer_norm_linear(const Tensor& input, const OptionalTensor& norm_weight,
                                      const OptionalTensor& norm_bias, at::TensorList weights,
                                      const c10::List<OptionalTensor>& biases, double eps) {
  return through_linears<LayerNormProducer>(
      {eps}, {input, value_or_undefined(norm_weight), value_or_undefined(norm_bias)},
      {weights.vec(), values_or_undefined(biases)});
}

std::vector<Tensor> rms_norm_linear(const Tensor& input, const OptionalTensor& norm_weight,
                                    at::TensorList weights, const c10::List<OptionalTensor>& biases,
                                    std::optional<double> eps, bool zero_centered_weight) {
  return through_linears<RmsNormProducer>({eps, zero_centered_weight},
                                          {input, value_or_undefined(norm_weight)},
                                          {weights.vec(), values_or_undefined(biases)});
}

void register_ops(torch::Library& m) {
  m.impl("layer_norm_linear", layer_norm_linear);
  m.impl("rms_norm_linear", rms_norm_linear);
}

}  // namespace

// Compositions of dispatcher ops, with no kernel of their own: the same function serves with and
// without gradients, on every device.
TORCH_LIBRARY_IMPL(memopt, Autograd, m) {
  register_ops(m);
}
TORCH_LIBRARY_IMPL(memopt, CompositeExplicitAutograd, m) {
  register_ops(m);
}

}  // namespace memopt::autograd
