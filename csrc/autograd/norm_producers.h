// The norms as producers (linears.h).
#pragma once

#include <ATen/ops/layer_norm.h>

#include <array>
#include <tuple>
#include <vector>

#include "layer_norm.h"
#include "producer.h"
#include "rms_norm.h"

namespace memopt::autograd {

// Where there is no norm.
struct NoNormProducer {
  struct Options {};

  static Produced forward(const Options&, const variable_list& in) { return {in[0], {}}; }
  static Reproduced backward(const Options&, const variable_list& in, const variable_list&,
                             const Tensor& grad, const Request&) {
    return {{grad}, in[0]};
  }
  static variable_list differentiable_backward(const Options&, const variable_list&,
                                               const variable_list&, const Tensor& grad,
                                               const std::vector<bool>&) {
    return {grad};
  }
  static Tensor differentiable_forward(const Options&, const variable_list& in,
                                       const variable_list&) {
    return in[0];
  }
};

struct LayerNormProducer {
  static constexpr const char* kName = "layer_norm_linear";
  static c10::SymInt features(const variable_list& in) { return in[0].sym_size(-1); }
  struct Options {
    double eps;
  };

  static void save(AutogradContext* ctx, const Options& options) {
    ctx->saved_data["eps"] = options.eps;
  }
  static Options restore(AutogradContext* ctx) { return {ctx->saved_data["eps"].toDouble()}; }

  static Produced forward(const Options& options, const variable_list& in) {
    using Forward = std::tuple<Tensor, Tensor, Tensor>(
        const Tensor&, c10::SymIntArrayRef, const OptionalTensor&, const OptionalTensor&, double);
    static const auto op = find_op<Forward>("memopt::_layer_norm_forward");
    const auto [output, mean, rstd] = op.call(in[0], in[0].sym_sizes().slice(in[0].dim() - 1),
                                              as_optional(in[1]), as_optional(in[2]), options.eps);
    return {output, {mean, rstd}};
  }

  static Reproduced backward(const Options&, const variable_list& in, const variable_list& extras,
                             const Tensor& grad, const Request& request) {
    const std::vector<bool>& wanted = request.grads;
    const auto row = in[0].sym_sizes().slice(in[0].dim() - 1);
    if (wanted[0] && may_overwrite(grad)) {
      using Overwrite = std::tuple<Tensor, Tensor, Tensor>(
          const Tensor&, const Tensor&, c10::SymIntArrayRef, const Tensor&, const Tensor&,
          const OptionalTensor&, const OptionalTensor&, std::array<bool, 2>, bool);
      static const auto op = find_op<Overwrite>("memopt::_layer_norm_backward_");
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      const auto [dweight, dbias, output] =
          op.call(grad, in[0], row, extras[0], extras[1], as_optional(in[1]), as_optional(in[2]),
                  {wanted[1], wanted[2]}, request.output);
      return {{grad, dweight, dbias}, output};
    }
    using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor>(
        const Tensor&, const Tensor&, c10::SymIntArrayRef, const Tensor&, const Tensor&,
        const OptionalTensor&, const OptionalTensor&, std::array<bool, 3>, bool);
    static const auto op = find_op<Backward>("memopt::_layer_norm_backward");
    const auto [dx, dweight, dbias, output] =
        op.call(grad, in[0], row, extras[0], extras[1], as_optional(in[1]), as_optional(in[2]),
                {wanted[0], wanted[1], wanted[2]}, request.output);
    return {{dx, dweight, dbias}, output};
  }

  static LayerNormSaved as_saved(const variable_list& in, const variable_list& extras,
                                 const std::vector<bool>& wanted) {
    return {in[0],
            in[1],
            in[2],
            extras[0],
            extras[1],
            in[0].sym_sizes().slice(in[0].dim() - 1).vec(),
            {wanted[0], wanted[1], wanted[2]}};
  }

  static variable_list differentiable_backward(const Options&, const variable_list& in,
                                               const variable_list& extras, const Tensor& grad,
                                               const std::vector<bool>& wanted) {
    const LayerNormSaved saved = as_saved(in, extras, wanted);
    const auto grads = autograd::differentiable_backward(saved, widen(saved), grad);
    return {grads.begin(), grads.end()};
  }

  static Tensor differentiable_forward(const Options& options, const variable_list& in,
                                       const variable_list&) {
    const auto wide = [](const Tensor& t) {
      return t.defined() ? OptionalTensor(widen(t)) : std::nullopt;
    };
    return at::layer_norm_symint(widen(in[0]), in[0].sym_sizes().slice(in[0].dim() - 1),
                                 wide(in[1]), wide(in[2]), options.eps)
        .to(in[0].scalar_type());
  }
};

struct RmsNormProducer {
  static constexpr const char* kName = "rms_norm_linear";
  static c10::SymInt features(const variable_list& in) { return in[0].sym_size(-1); }
  struct Options {
    std::optional<double> eps;
    bool zero_centered_weight;
  };

  static void save(AutogradContext* ctx, const Options& options) {
    ctx->saved_data["eps"] = options.eps;
    ctx->saved_data["zero_centered_weight"] = options.zero_centered_weight;
  }
  static Options restore(AutogradContext* ctx) {
    return {ctx->saved_data["eps"].toOptional<double>(),
            ctx->saved_data["zero_centered_weight"].toBool()};
  }

  static Produced forward(const Options& options, const variable_list& in) {
    using Forward = std::tuple<Tensor, Tensor>(const Tensor&, c10::SymIntArrayRef,
                                               const OptionalTensor&, std::optional<double>, bool);
    static const auto op = find_op<Forward>("memopt::_rms_norm_forward");
    const auto [output, rstd] =
        op.call(in[0], in[0].sym_sizes().slice(in[0].dim() - 1), as_optional(in[1]), options.eps,
                options.zero_centered_weight);
    return {output, {rstd}};
  }

  static Reproduced backward(const Options& options, const variable_list& in,
                             const variable_list& extras, const Tensor& grad,
                             const Request& request) {
    const std::vector<bool>& wanted = request.grads;
    const auto row = in[0].sym_sizes().slice(in[0].dim() - 1);
    if (wanted[0] && may_overwrite(grad)) {
      using Overwrite =
          std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, c10::SymIntArrayRef,
                                     const Tensor&, const OptionalTensor&, bool, bool, bool);
      static const auto op = find_op<Overwrite>("memopt::_rms_norm_backward_");
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      const auto [dweight, output] =
          op.call(grad, in[0], row, extras[0], as_optional(in[1]), wanted[1], request.output,
                  options.zero_centered_weight);
      return {{grad, dweight}, output};
    }
    using Backward = std::tuple<Tensor, Tensor, Tensor>(
        const Tensor&, const Tensor&, c10::SymIntArrayRef, const Tensor&, const OptionalTensor&,
        std::array<bool, 2>, bool, bool);
    static const auto op = find_op<Backward>("memopt::_rms_norm_backward");
    const auto [dx, dweight, output] =
        op.call(grad, in[0], row, extras[0], as_optional(in[1]), {wanted[0], wanted[1]},
                request.output, options.zero_centered_weight);
    return {{dx, dweight}, output};
  }

  static RmsNormSaved as_saved(const Options& options, const variable_list& in,
                               const std::vector<bool>& wanted) {
    RmsNormSaved saved{in[0], in[1], Tensor()};
    saved.normalized_shape = in[0].sym_sizes().slice(in[0].dim() - 1).vec();
    saved.eps = options.eps;
    saved.zero_centered_weight = options.zero_centered_weight;
    saved.wanted = {wanted[0], wanted[1]};
    return saved;
  }

  static variable_list differentiable_backward(const Options& options, const variable_list& in,
                                               const variable_list&, const Tensor& grad,
                                               const std::vector<bool>& wanted) {
    const auto grads = autograd::differentiable_backward(as_saved(options, in, wanted), grad);
    return {grads.begin(), grads.end()};
  }

  static Tensor differentiable_forward(const Options& options, const variable_list& in,
                                       const variable_list&) {
    return autograd::differentiable_forward(as_saved(options, in, {true, true}));
  }
};

}  // namespace memopt::autograd
