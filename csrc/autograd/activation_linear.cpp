// activation_linear, gated_linear, gated_packed_linear: an activation or a gated unit in front of a
// linear.
//
// Saved: the activation's input, 2 bytes an element in bfloat16 (a gated unit's gate and up, 4).
// Eager PyTorch saves the activation's output as well, and of a gated unit f(gate) besides.
// Backward: linears.h.
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <array>
#include <tuple>

#include "activation.h"
#include "gated.h"
#include "linears.h"

namespace memopt::autograd {
namespace {

struct ActivationOptions {
  std::string activation;  // the name, as in ops/activation.h
};

void save_activation(AutogradContext* ctx, const ActivationOptions& options) {
  ctx->saved_data["activation"] = options.activation;
}
ActivationOptions restore_activation(AutogradContext* ctx) {
  return {ctx->saved_data["activation"].toStringRef()};
}

struct ActivationProducer {
  static constexpr const char* kName = "activation_linear";
  static c10::SymInt features(const variable_list& in) { return in[0].sym_size(-1); }
  using Options = ActivationOptions;
  static void save(AutogradContext* ctx, const Options& options) { save_activation(ctx, options); }
  static Options restore(AutogradContext* ctx) { return restore_activation(ctx); }

  static Produced forward(const Options& options, const variable_list& in) {
    static const auto op =
        find_op<Tensor(const Tensor&, std::string_view)>("memopt::_activation_forward");
    return {op.call(in[0], options.activation), {}};
  }

  static Reproduced backward(const Options& options, const variable_list& in, const variable_list&,
                             const Tensor& grad, const std::vector<bool>&, bool output_again) {
    using Backward =
        std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, std::string_view, bool);
    static const auto op = find_op<Backward>("memopt::_activation_backward");
    const auto [dx, output] = op.call(grad, in[0], options.activation, output_again);
    return {{dx}, output};
  }

  static variable_list differentiable_backward(const Options& options, const variable_list& in,
                                               const variable_list&, const Tensor& grad,
                                               const std::vector<bool>&) {
    return {activation_gradient(options.activation, widened(grad), widened(in[0]))
                .to(in[0].scalar_type())};
  }

  static Tensor differentiable_forward(const Options& options, const variable_list& in) {
    return activation_value(options.activation, widened(in[0])).to(in[0].scalar_type());
  }
};

struct GatedProducer {
  static constexpr const char* kName = "gated_linear";
  static c10::SymInt features(const variable_list& in) { return in[0].sym_size(-1); }
  using Options = ActivationOptions;
  static void save(AutogradContext* ctx, const Options& options) { save_activation(ctx, options); }
  static Options restore(AutogradContext* ctx) { return restore_activation(ctx); }

  static Produced forward(const Options& options, const variable_list& in) {
    static const auto op =
        find_op<Tensor(const Tensor&, const Tensor&, std::string_view)>("memopt::gated");
    return {op.call(in[0], in[1], options.activation), {}};
  }

  static Reproduced backward(const Options& options, const variable_list& in, const variable_list&,
                             const Tensor& grad, const std::vector<bool>& wanted,
                             bool output_again) {
    using Backward =
        std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&,
                                           std::string_view, std::array<bool, 2>, bool);
    static const auto op = find_op<Backward>("memopt::_gated_backward");
    const auto [dgate, dup, output] =
        op.call(grad, in[0], in[1], options.activation, {wanted[0], wanted[1]}, output_again);
    return {{dgate, dup}, output};
  }

  static variable_list differentiable_backward(const Options& options, const variable_list& in,
                                               const variable_list&, const Tensor& grad,
                                               const std::vector<bool>& wanted) {
    const std::string& name = options.activation;
    return {wanted[0] ? composed_grad_gate(name, grad, in[0], in[1]) : Tensor(),
            wanted[1] ? composed_grad_up(name, grad, in[0]) : Tensor()};
  }

  static Tensor differentiable_forward(const Options& options, const variable_list& in) {
    return activation_value(options.activation, widened(in[0]))
        .mul(widened(in[1]))
        .to(in[0].scalar_type());
  }
};

struct PackedProducer {
  static constexpr const char* kName = "gated_packed_linear";
  static c10::SymInt features(const variable_list& in) { return in[0].sym_size(-1) / 2; }
  struct Options {
    std::string activation;
    bool interleaved;
  };
  static void save(AutogradContext* ctx, const Options& options) {
    save_activation(ctx, {options.activation});
    ctx->saved_data["interleaved"] = options.interleaved;
  }
  static Options restore(AutogradContext* ctx) {
    return {restore_activation(ctx).activation, ctx->saved_data["interleaved"].toBool()};
  }

  static Produced forward(const Options& options, const variable_list& in) {
    static const auto op =
        find_op<Tensor(const Tensor&, std::string_view, bool)>("memopt::gated_packed");
    return {op.call(in[0], options.activation, options.interleaved), {}};
  }

  static Reproduced backward(const Options& options, const variable_list& in, const variable_list&,
                             const Tensor& grad, const std::vector<bool>&, bool output_again) {
    using Backward =
        std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, std::string_view, bool, bool);
    static const auto op = find_op<Backward>("memopt::_gated_packed_backward");
    const auto [dx, output] =
        op.call(grad, in[0], options.activation, options.interleaved, output_again);
    return {{dx}, output};
  }

  static variable_list differentiable_backward(const Options& options, const variable_list& in,
                                               const variable_list&, const Tensor& grad,
                                               const std::vector<bool>&) {
    return {composed_packed_grad(options.activation, grad, in[0], options.interleaved)};
  }

  static Tensor differentiable_forward(const Options& options, const variable_list& in) {
    const auto [gate, up] = packed_halves(in[0], options.interleaved);
    return GatedProducer::differentiable_forward({options.activation}, {gate, up});
  }
};

Tensor activation_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                         std::string_view activation) {
  return through_linears<ActivationProducer>({std::string(activation)}, {input},
                                             {{weight}, {value_or_undefined(bias)}})[0];
}

Tensor gated_linear(const Tensor& gate, const Tensor& up, const Tensor& weight,
                    const OptionalTensor& bias, std::string_view activation) {
  return through_linears<GatedProducer>({std::string(activation)}, {gate, up},
                                        {{weight}, {value_or_undefined(bias)}})[0];
}

Tensor gated_packed_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                           std::string_view activation, bool interleaved) {
  return through_linears<PackedProducer>({std::string(activation), interleaved}, {input},
                                         {{weight}, {value_or_undefined(bias)}})[0];
}

void register_ops(torch::Library& m) {
  m.impl("activation_linear", activation_linear);
  m.impl("gated_linear", gated_linear);
  m.impl("gated_packed_linear", gated_packed_linear);
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, Autograd, m) {
  register_ops(m);
}
TORCH_LIBRARY_IMPL(memopt, CompositeExplicitAutograd, m) {
  register_ops(m);
}

}  // namespace memopt::autograd
