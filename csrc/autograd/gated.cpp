// gated, swiglu, geglu and their packed forms: save gate and up (or the tensor that holds both);
// recompute f(gate).
//
//   grad_gate = grad_output up f'(gate)        grad_up = grad_output f(gate)
//
// Saved: gate and up, 4 bytes an element of the output in bfloat16; up only if gate requires a
// gradient. Eager PyTorch saves f(gate) as well, 6 bytes. The public ops are the forward ops as
// well: there is nothing more to compute for backward.
#include "gated.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <array>
#include <functional>
#include <string>
#include <string_view>
#include <tuple>

#include "activation.h"

#include "recipe.h"

namespace memopt::autograd {

Tensor composed_grad_gate(std::string_view name, const Tensor& grad, const Tensor& gate,
                          const Tensor& up) {
  return activation_gradient(name, widened(grad).mul(widened(up)), widened(gate))
      .to(gate.scalar_type());
}

Tensor composed_grad_up(std::string_view name, const Tensor& grad, const Tensor& gate) {
  return widened(grad).mul(activation_value(name, widened(gate))).to(gate.scalar_type());
}

std::array<Tensor, 2> packed_halves(const Tensor& input, bool interleaved) {
  const c10::SymInt cols = input.sym_size(-1) / 2;
  const auto half = [&](int64_t i) {
    return interleaved ? input.slice_symint(-1, i, std::nullopt, 2)
                       : input.narrow_symint(-1, i * cols, cols);
  };
  return {half(0), half(1)};
}

Tensor composed_packed_grad(std::string_view name, const Tensor& grad, const Tensor& input,
                            bool interleaved) {
  const auto [gate, up] = packed_halves(input, interleaved);
  const std::array<Tensor, 2> halves = {composed_grad_gate(name, grad, gate, up),
                                        composed_grad_up(name, grad, gate)};
  return interleaved ? at::stack(halves, -1).flatten(-2) : at::cat(halves, -1);
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Run = std::function<Tensor(const Tensor&, const Tensor&)>;
using RunPacked = std::function<Tensor(const Tensor&)>;
using Backward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&,
                                                    const OptionalTensor&, std::string_view,
                                                    std::array<bool, 2>, bool);
using PackedBackward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, std::string_view,
                                                  bool, bool);

struct Gated : torch::autograd::Function<Gated> {
  static constexpr bool is_traceable = true;

  // `run` is the op below autograd; `name` is the activation's.
  static Tensor forward(AutogradContext* ctx, const Tensor& gate, const Tensor& up,
                        std::string_view name, const Run& run) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    // Not needs_input_grad: in a recompute that asks about the backward that is running.
    ctx->save_for_backward({gate, gate.requires_grad() ? up : Tensor()});
    ctx->saved_data["activation"] = std::string(name);
    const Tensor output = run(gate, up);
    remember(output, [&] {
      return Recipe{
          {gate, up}, [name = std::string(name)](const variable_list& saved) {
            static const auto op =
                find_op<Tensor(const Tensor&, const Tensor&, std::string_view)>("memopt::gated");
            return op.call(saved[0], saved[1], name);
          }};
    });
    return output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<Backward>("memopt::_gated_backward");
    const variable_list saved = ctx->get_saved_variables();
    const Tensor gate = saved[0], up = saved[1];
    const std::string name = ctx->saved_data["activation"].toStringRef();
    const std::array<bool, 2> wanted = {ctx->needs_input_grad(0), ctx->needs_input_grad(1)};
    if (at::GradMode::is_enabled()) {
      return {wanted[0] ? composed_grad_gate(name, grads[0], gate, up) : Tensor(),
              wanted[1] ? composed_grad_up(name, grads[0], gate) : Tensor(), Tensor(), Tensor()};
    }
    const auto [dgate, dup, output] =
        op.call(grads[0], gate, as_optional(up), name, wanted, /*recompute_output=*/false);
    return {dgate, dup, Tensor(), Tensor()};
  }
};

struct GatedPacked : torch::autograd::Function<GatedPacked> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, std::string_view name,
                        bool interleaved, const RunPacked& run) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({input});
    ctx->saved_data["activation"] = std::string(name);
    ctx->saved_data["interleaved"] = interleaved;
    const Tensor output = run(input);
    remember(output, [&] {
      return Recipe{{input}, [name = std::string(name), interleaved](const variable_list& saved) {
                      static const auto op = find_op<Tensor(const Tensor&, std::string_view, bool)>(
                          "memopt::gated_packed");
                      return op.call(saved[0], name, interleaved);
                    }};
    });
    return output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<PackedBackward>("memopt::_gated_packed_backward");
    const Tensor input = ctx->get_saved_variables()[0];
    const std::string name = ctx->saved_data["activation"].toStringRef();
    const bool interleaved = ctx->saved_data["interleaved"].toBool();
    if (at::GradMode::is_enabled())
      return {composed_packed_grad(name, grads[0], input, interleaved), Tensor(), Tensor(),
              Tensor()};
    return {std::get<0>(op.call(grads[0], input, name, interleaved, /*recompute_output=*/false)),
            Tensor(), Tensor(), Tensor()};
  }
};

Tensor apply(const Tensor& gate, const Tensor& up, std::string_view name, const Run& run) {
  if (needs_node(gate, up)) return Gated::apply(gate, up, name, run);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return run(gate, up);
}

Tensor apply_packed(const Tensor& input, std::string_view name, bool interleaved,
                    const RunPacked& run) {
  if (needs_node(input)) return GatedPacked::apply(input, name, interleaved, run);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return run(input);
}

std::string_view gelu_name(std::string_view approximate) {
  return approximate == "tanh" ? "gelu_tanh" : "gelu";
}

Tensor gated(const Tensor& gate, const Tensor& up, std::string_view activation) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, std::string_view)>("memopt::gated");
  return apply(gate, up, activation,
               [&](const Tensor& g, const Tensor& u) { return op.call(g, u, activation); });
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  static const auto op = find_op<Tensor(const Tensor&, const Tensor&)>("memopt::swiglu");
  return apply(gate, up, "silu", [](const Tensor& g, const Tensor& u) { return op.call(g, u); });
}

Tensor geglu(const Tensor& gate, const Tensor& up, std::string_view approximate) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, std::string_view)>("memopt::geglu");
  return apply(gate, up, gelu_name(approximate),
               [&](const Tensor& g, const Tensor& u) { return op.call(g, u, approximate); });
}

Tensor gated_packed(const Tensor& input, std::string_view activation, bool interleaved) {
  static const auto op =
      find_op<Tensor(const Tensor&, std::string_view, bool)>("memopt::gated_packed");
  return apply_packed(input, activation, interleaved,
                      [&](const Tensor& x) { return op.call(x, activation, interleaved); });
}

Tensor swiglu_packed(const Tensor& input, bool interleaved) {
  static const auto op = find_op<Tensor(const Tensor&, bool)>("memopt::swiglu_packed");
  return apply_packed(input, "silu", interleaved,
                      [&](const Tensor& x) { return op.call(x, interleaved); });
}

Tensor geglu_packed(const Tensor& input, bool interleaved, std::string_view approximate) {
  static const auto op =
      find_op<Tensor(const Tensor&, bool, std::string_view)>("memopt::geglu_packed");
  return apply_packed(input, gelu_name(approximate), interleaved,
                      [&](const Tensor& x) { return op.call(x, interleaved, approximate); });
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, Autograd, m) {
  m.impl("gated", gated);
  m.impl("swiglu", swiglu);
  m.impl("geglu", geglu);
  m.impl("_gated_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("gated_packed", gated_packed);
  m.impl("swiglu_packed", swiglu_packed);
  m.impl("geglu_packed", geglu_packed);
  m.impl("_gated_packed_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace memopt::autograd
