// gelu, silu, relu, quick_gelu, relu_squared, sigmoid: save their input; recompute everything else.
//
//   grad_input = grad_output f'(input)
//
// Saved: input, 2 bytes an element in bfloat16. The consumer of the output (a Linear, say) saves
// that output itself. The public op is the forward op as well: there is nothing more to compute for
// backward.
#include "activation.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/threshold_backward.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <functional>
#include <string>
#include <tuple>

#include "recipe.h"

namespace memopt::autograd {

Tensor widened(const Tensor& tensor) {
  const bool narrow = tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
  return narrow ? tensor.to(at::kFloat) : tensor;
}

Tensor activation_value(std::string_view name, const Tensor& x) {
  if (name == "gelu") return at::gelu(x, "none");
  if (name == "gelu_tanh") return at::gelu(x, "tanh");
  if (name == "silu") return x.mul(at::sigmoid(x));
  if (name == "relu") return at::relu(x);
  if (name == "quick_gelu") return x.mul(at::sigmoid(x.mul(1.702)));
  if (name == "relu_squared") return at::relu(x).square();
  return at::sigmoid(x);
}

Tensor activation_gradient(std::string_view name, const Tensor& grad, const Tensor& x) {
  if (name == "gelu") return at::gelu_backward(grad, x, "none");
  if (name == "gelu_tanh") return at::gelu_backward(grad, x, "tanh");
  if (name == "relu") return at::threshold_backward(grad, x, 0);
  if (name == "relu_squared") return at::threshold_backward(grad.mul(x).mul(2), x, 0);
  const double scale = name == "quick_gelu" ? 1.702 : 1.0;
  const Tensor s = at::sigmoid(x.mul(scale));
  const Tensor ds = s.mul(s.neg().add(1));
  return grad.mul(name == "sigmoid" ? ds : s.add(x.mul(ds), scale));
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Backward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, std::string_view, bool);

struct ActivationFunction : torch::autograd::Function<ActivationFunction> {
  static constexpr bool is_traceable = true;

  // `run` is the op below autograd; `name` is the activation's.
  static Tensor forward(AutogradContext* ctx, const Tensor& input, std::string_view name,
                        const std::function<Tensor(const Tensor&)>& run) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({input});
    ctx->saved_data["activation"] = std::string(name);
    const Tensor output = run(input);
    remember(output, [&] {
      return Recipe{{input}, [name = std::string(name)](const variable_list& saved) {
                      static const auto again = find_op<Tensor(const Tensor&, std::string_view)>(
                          "memopt::_activation_forward");
                      return again.call(saved[0], name);
                    }};
    });
    return output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<Backward>("memopt::_activation_backward");
    const Tensor input = ctx->get_saved_variables()[0];
    const std::string name = ctx->saved_data["activation"].toStringRef();
    if (at::GradMode::is_enabled()) {
      const Tensor dx = activation_gradient(name, widened(grads[0]), widened(input));
      return {dx.to(input.scalar_type()), Tensor(), Tensor()};
    }
    return {std::get<0>(op.call(grads[0], input, name, /*recompute_output=*/false)), Tensor(),
            Tensor()};
  }
};

Tensor apply(const Tensor& input, std::string_view name,
             const std::function<Tensor(const Tensor&)>& run) {
  if (needs_node(input)) return ActivationFunction::apply(input, name, run);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return run(input);
}

Tensor gelu(const Tensor& input, std::string_view approximate) {
  static const auto op = find_op<Tensor(const Tensor&, std::string_view)>("memopt::gelu");
  return apply(input, approximate == "tanh" ? "gelu_tanh" : "gelu",
               [&](const Tensor& x) { return op.call(x, approximate); });
}

constexpr char kSilu[] = "memopt::silu", kRelu[] = "memopt::relu",
               kQuickGelu[] = "memopt::quick_gelu", kReluSquared[] = "memopt::relu_squared",
               kSigmoid[] = "memopt::sigmoid";

template <const char* kOp>
Tensor activation(const Tensor& input) {
  static const auto op = find_op<Tensor(const Tensor&)>(kOp);
  constexpr std::string_view kPrefix = "memopt::";
  return apply(input, kOp + kPrefix.size(), [](const Tensor& x) { return op.call(x); });
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, Autograd, m) {
  m.impl("gelu", gelu);
  m.impl("silu", activation<kSilu>);
  m.impl("relu", activation<kRelu>);
  m.impl("quick_gelu", activation<kQuickGelu>);
  m.impl("relu_squared", activation<kReluSquared>);
  m.impl("sigmoid", activation<kSigmoid>);
  m.impl("_activation_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("_activation_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace memopt::autograd
