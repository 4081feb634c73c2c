// The activations and the gated units as producers (linears.h).
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>

#include <array>
#include <string>
#include <tuple>
#include <vector>

#include "activation.h"
#include "activation_dropout.h"
#include "dropout.h"
#include "gated.h"
#include "producer.h"

namespace memopt::autograd {

struct ActivationOptions {
  std::string activation;  // the name, as in ops/activation.h
  double dropout = 0.0;    // behind it, in mlp; its state is the extra
};

// Of the ops with a linear behind, which have no dropout.
inline void save_activation(AutogradContext* ctx, const ActivationOptions& options) {
  ctx->saved_data["activation"] = options.activation;
}
inline ActivationOptions restore_activation(AutogradContext* ctx) {
  return {ctx->saved_data["activation"].toStringRef()};
}

// The dropout behind an activation, as a step of its own, with the state at hand; differentiable.
inline Tensor drop_again(const ActivationOptions& options, const Tensor& tensor,
                         const variable_list& extras) {
  return options.dropout == 0.0 ? tensor : drop_again(tensor, extras[0], options.dropout);
}

struct ActivationProducer {
  static constexpr const char* kName = "activation_linear";
  static c10::SymInt features(const variable_list& in) { return in[0].sym_size(-1); }
  using Options = ActivationOptions;
  static void save(AutogradContext* ctx, const Options& options) { save_activation(ctx, options); }
  static Options restore(AutogradContext* ctx) { return restore_activation(ctx); }

  static Produced forward(const Options& options, const variable_list& in,
                          bool may_overwrite_inputs = false) {
    if (options.dropout == 0.0) return {activate(options, in, may_overwrite_inputs), {}};
    const auto [output, state] =
        activation_dropout_forward(in[0], options.dropout, options.activation);
    return {output, {state}};
  }
  // With forward's dropout.
  static Tensor forward_again(const Options& options, const variable_list& in,
                              const variable_list& extras) {
    if (options.dropout == 0.0) return activate(options, in, false);
    return activation_dropout_again(in[0], extras[0], options.dropout, options.activation);
  }

  static Reproduced backward(const Options& options, const variable_list& in,
                             const variable_list& extras, const Tensor& grad,
                             const Request& request) {
    if (options.dropout == 0.0) return activation_backward(options, in, grad, request);
    const auto [dx, output] = activation_dropout_backward(grad, in[0], extras[0], options.dropout,
                                                          options.activation, request.output);
    return {{dx}, output};
  }

  static variable_list differentiable_backward(const Options& options, const variable_list& in,
                                               const variable_list& extras, const Tensor& grad,
                                               const std::vector<bool>&) {
    const Tensor kept = drop_again(options, grad, extras);
    return {activation_gradient(options.activation, widened(kept), widened(in[0]))
                .to(in[0].scalar_type())};
  }

  static Tensor differentiable_forward(const Options& options, const variable_list& in,
                                       const variable_list& extras) {
    const Tensor value = activation_value(options.activation, widened(in[0]));
    return drop_again(options, value, extras).to(in[0].scalar_type());
  }

 private:
  static Tensor activate(const Options& options, const variable_list& in,
                         bool may_overwrite_inputs) {
    if (may_overwrite_inputs && may_overwrite(in[0])) {
      static const auto op =
          find_op<void(const Tensor&, std::string_view)>("memopt::_activation_forward_");
      op.call(in[0], options.activation);
      return in[0];
    }
    static const auto op =
        find_op<Tensor(const Tensor&, std::string_view)>("memopt::_activation_forward");
    return op.call(in[0], options.activation);
  }

  static Reproduced activation_backward(const Options& options, const variable_list& in,
                                        const Tensor& grad, const Request& request) {
    if (may_overwrite(grad, in[0])) {
      using Overwrite = void(const Tensor&, const Tensor&, std::string_view, const OptionalTensor&);
      static const auto op = find_op<Overwrite>("memopt::_activation_backward_");
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      Tensor output;
      if (request.output) output = request.may_overwrite_inputs ? in[0] : at::empty_like(in[0]);
      op.call(grad, in[0], options.activation, as_optional(output));
      return {{grad}, output};
    }
    using Backward =
        std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, std::string_view, bool);
    static const auto op = find_op<Backward>("memopt::_activation_backward");
    const auto [dx, output] = op.call(grad, in[0], options.activation, request.output);
    return {{dx}, output};
  }
};

// The same behind an op that has run: the output and the state that was drawn.
inline Produced drop(const ActivationOptions& options, const Tensor& output) {
  if (options.dropout == 0.0) return {output, {}};
  const auto [kept, state] = dropout_forward(output, options.dropout);
  return {kept, {state}};
}

struct GatedProducer {
  static constexpr const char* kName = "gated_linear";
  static c10::SymInt features(const variable_list& in) { return in[0].sym_size(-1); }
  using Options = ActivationOptions;
  static void save(AutogradContext* ctx, const Options& options) { save_activation(ctx, options); }
  static Options restore(AutogradContext* ctx) { return restore_activation(ctx); }

  static Produced forward(const Options& options, const variable_list& in,
                          bool may_overwrite_inputs = false) {
    return drop(options, gated(options, in, may_overwrite_inputs));
  }
  static Tensor forward_again(const Options& options, const variable_list& in,
                              const variable_list& extras) {
    return drop_again(options, gated(options, in, false), extras);
  }

  static Reproduced backward(const Options& options, const variable_list& in,
                             const variable_list& extras, const Tensor& grad,
                             const Request& request) {
    Reproduced again = gated_backward(options, in, drop_again(options, grad, extras), request);
    again.output = drop_again(options, again.output, extras);
    return again;
  }

  static variable_list differentiable_backward(const Options& options, const variable_list& in,
                                               const variable_list& extras, const Tensor& grad,
                                               const std::vector<bool>& wanted) {
    const std::string& name = options.activation;
    const Tensor kept = drop_again(options, grad, extras);
    return {wanted[0] ? composed_grad_gate(name, kept, in[0], in[1]) : Tensor(),
            wanted[1] ? composed_grad_up(name, kept, in[0]) : Tensor()};
  }

  static Tensor differentiable_forward(const Options& options, const variable_list& in,
                                       const variable_list& extras) {
    const Tensor value = activation_value(options.activation, widened(in[0])).mul(widened(in[1]));
    return drop_again(options, value, extras).to(in[0].scalar_type());
  }

 private:
  static Tensor gated(const Options& options, const variable_list& in, bool may_overwrite_inputs) {
    if (may_overwrite_inputs && may_overwrite(in[0], in[1])) {
      static const auto op =
          find_op<void(const Tensor&, const Tensor&, std::string_view)>("memopt::_gated_forward_");
      op.call(in[0], in[1], options.activation);
      return in[0];
    }
    static const auto op =
        find_op<Tensor(const Tensor&, const Tensor&, std::string_view)>("memopt::gated");
    return op.call(in[0], in[1], options.activation);
  }

  static Reproduced gated_backward(const Options& options, const variable_list& in,
                                   const Tensor& grad, const Request& request) {
    const std::vector<bool>& wanted = request.grads;
    if (wanted[0] && may_overwrite(grad, in[0], in[1])) {
      using Overwrite = void(const Tensor&, const Tensor&, const Tensor&, std::string_view,
                             const OptionalTensor&, const OptionalTensor&);
      static const auto op = find_op<Overwrite>("memopt::_gated_backward_");
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      const auto place = [&](bool needed, const Tensor& input) {
        if (!needed) return Tensor();
        return request.may_overwrite_inputs ? input : at::empty_like(input);
      };
      const Tensor dup = place(wanted[1], in[1]), output = place(request.output, in[0]);
      op.call(grad, in[0], in[1], options.activation, as_optional(dup), as_optional(output));
      return {{grad, dup}, output};
    }
    using Backward =
        std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&,
                                           std::string_view, std::array<bool, 2>, bool);
    static const auto op = find_op<Backward>("memopt::_gated_backward");
    const auto [dgate, dup, output] =
        op.call(grad, in[0], in[1], options.activation, {wanted[0], wanted[1]}, request.output);
    return {{dgate, dup}, output};
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
                             const Tensor& grad, const Request& request) {
    using Backward =
        std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, std::string_view, bool, bool);
    static const auto op = find_op<Backward>("memopt::_gated_packed_backward");
    const auto [dx, output] =
        op.call(grad, in[0], options.activation, options.interleaved, request.output);
    return {{dx}, output};
  }

  static variable_list differentiable_backward(const Options& options, const variable_list& in,
                                               const variable_list&, const Tensor& grad,
                                               const std::vector<bool>&) {
    return {composed_packed_grad(options.activation, grad, in[0], options.interleaved)};
  }

  static Tensor differentiable_forward(const Options& options, const variable_list& in,
                                       const variable_list& extras) {
    const auto [gate, up] = packed_halves(in[0], options.interleaved);
    return GatedProducer::differentiable_forward({options.activation}, {gate, up}, extras);
  }
};

}  // namespace memopt::autograd
