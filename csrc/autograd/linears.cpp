#include "linears.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>

#include <string>

#include "../ops/checks.h"
#include "ownership.h"

namespace memopt::autograd {

Tensor as_matrix(const Tensor& tensor) {
  const c10::SymIntArrayRef sizes = tensor.sym_sizes();
  c10::SymInt rows = 1;
  for (const c10::SymInt& size : sizes.slice(0, sizes.size() - 1)) rows *= size;
  return tensor.reshape_symint({rows, sizes.back()});
}

void check_features(const char* op, const char* name, const Tensor& tensor) {
  ops::check_input(op, name, tensor);
  TORCH_CHECK(tensor.dim() >= 1, op, ": ", name, " must have at least one dimension, got a scalar");
}

void check_linears(const char* op, const Tensor& input, const c10::SymInt& features,
                   const Linears& linears) {
  TORCH_CHECK(!linears.weights.empty(), op, ": weights must hold at least one weight, got none");
  TORCH_CHECK(linears.biases.size() == linears.weights.size(), op,
              ": biases must have one entry for each weight, got ", linears.biases.size(), " for ",
              linears.weights.size());
  for (size_t i = 0; i < linears.weights.size(); ++i) {
    const std::string place = std::to_string(i);
    check_linear(op, ("weight " + place).c_str(), ("bias " + place).c_str(), input, features,
                 linears.weights[i], linears.biases[i]);
  }
}

void check_linear(const char* op, const char* weight_name, const char* bias_name,
                  const Tensor& input, const c10::SymInt& features, const Tensor& weight,
                  const Tensor& bias) {
  TORCH_CHECK(weight.dim() == 2 && TORCH_GUARD_OR_FALSE(weight.sym_size(1).sym_eq(features)), op,
              ": ", weight_name, " must have shape [out, ", features, "] (the features), got ",
              weight.sym_sizes());
  TORCH_CHECK(weight.scalar_type() == input.scalar_type(), op, ": ", weight_name,
              " must have input's dtype ", input.scalar_type(), ", got ", weight.scalar_type());
  TORCH_CHECK(weight.device() == input.device(), op, ": ", weight_name,
              " must be on input's device ", input.device(), ", got ", weight.device());
  if (!bias.defined()) return;
  TORCH_CHECK(bias.dim() == 1 && TORCH_GUARD_OR_FALSE(bias.sym_size(0).sym_eq(weight.sym_size(0))),
              op, ": ", bias_name, " must have shape [", weight.sym_size(0),
              "] (its weight's first dimension), got ", bias.sym_sizes());
  TORCH_CHECK(bias.scalar_type() == weight.scalar_type() && bias.device() == weight.device(), op,
              ": ", bias_name, " must have its weight's dtype and device, got ", bias.scalar_type(),
              " on ", bias.device());
}

variable_list apply(const Linears& linears, const Tensor& x) {
  if (linears.weights.empty()) return {x};
  variable_list outputs;
  outputs.reserve(linears.weights.size());
  for (size_t i = 0; i < linears.weights.size(); ++i) {
    outputs.push_back(at::linear(x, linears.weights[i], as_optional(linears.biases[i])));
  }
  return outputs;
}

Tensor input_grad(at::TensorList grads, const variable_list& weights, const Tensor& start) {
  // A view that autograd knows would hold its base: the result would not be the caller's alone.
  std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd;
  if (!at::GradMode::is_enabled()) below_autograd.emplace();
  Tensor sum;
  c10::SymDimVector shape;
  for (size_t i = weights.size(); i-- > 0;) {
    if (!grads[i].defined()) continue;
    Tensor dx = at::mm(as_matrix(grads[i]), weights[i]);
    if (sum.defined()) {
      sum = add_to(std::move(sum), dx);
    } else {
      sum = start.defined() ? add_to(std::move(dx), as_matrix(start)) : std::move(dx);
      shape.assign(grads[i].sym_sizes().begin(), grads[i].sym_sizes().end());
      shape.back() = weights[i].sym_size(1);
    }
  }
  return sum.reshape_symint(shape);
}

Tensor weight_grad(const Tensor& grad, const Tensor& x) {
  return at::mm(as_matrix(grad).t(), as_matrix(x));
}

Tensor bias_grad(const Tensor& grad) {
  return at::sum(as_matrix(grad), at::IntArrayRef{0});
}

}  // namespace memopt::autograd
