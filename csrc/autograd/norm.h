// layer_norm, rms_norm, and both with a residual added in front, with dropout before that, or with
// GELU behind: one op. Formulas: kernels/norm.h.
//
//   output = norm(v)     v = input, or sum = input m + residual, m dropout's mask or 1
//
// Saved: v, 2 bytes an element in bfloat16 (a sum is the residual stream, which the caller holds
// anyway), 8 bytes a row (RMSNorm: 4), and 16 bytes a call with dropout. Neither input, residual
// nor m; neither xhat nor GELU's input z, which eager PyTorch saves. A gradient that is undefined,
// because nothing used that output, costs nothing.
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include "../ops/norm_kind.h"
#include "op.h"

namespace memopt::autograd {

struct NormOp : OpDefaults {
  struct Options {
    ops::NormKind kind = ops::NormKind::kLayerNorm;
    std::optional<double> eps;
    bool zero_centered_weight = false;  // RMSNorm's scale is 1 + weight
    std::string activation;             // behind it, or none
    int64_t normalized_dims = 1;
    bool adds = false;  // a residual
    bool drops = false;
    double p = 0.0;

    const char* norm() const { return ops::name_of(kind); }
  };
  template <class Options, class F>
  static void visit(Options& o, F&& f) {
    f(o.kind, o.eps, o.zero_centered_weight, o.activation, o.normalized_dims, o.adds, o.drops, o.p);
  }

  // input, residual if there is one, weight, bias; the output reads v, weight, bias.
  static constexpr size_t kReads = 3;
  static constexpr size_t kOthersFrom = 2;
  static c10::SymInt features(const Options&, const variable_list& in) {
    return in[0].sym_size(-1);
  }

  static Produced forward(const Options& options, const variable_list& in, bool for_backward);
  static Tensor forward_again(const Options& options, const variable_list& reads,
                              const variable_list& extras);
  static Reproduced backward(const Options& options, const variable_list& reads,
                             const variable_list& extras, const variable_list& grads,
                             const Request& request);
  static variable_list differentiable_backward(const Options& options, const variable_list& reads,
                                               const variable_list& extras,
                                               const variable_list& grads, const Wanted& wanted);
  static Tensor differentiable_forward(const Options& options, const variable_list& reads,
                                       const variable_list& extras);
};

// What the public ops call: layer_norm.cpp, rms_norm.cpp. `name` is the op that the user called.
Tensor run_norm(const char* name, NormOp::Options options, const Tensor& input,
                c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                const OptionalTensor& bias);

// The output and the sum.
std::tuple<Tensor, Tensor> run_add_norm(const char* name, NormOp::Options options,
                                        const Tensor& input, const Tensor& residual,
                                        c10::SymIntArrayRef normalized_shape,
                                        const OptionalTensor& weight, const OptionalTensor& bias);

// Where vmap runs: PyTorch's loop over a batch takes no lists of tensors, but batches a norm and a
// linear each. `normed` is the norm's output; nothing is fused.
std::vector<Tensor> batched_linears(const Tensor& normed, at::TensorList weights,
                                    const c10::List<OptionalTensor>& biases);

// One norm in front of one or several linears: separate query, key and value projections, say.
std::vector<Tensor> run_norm_linear(const char* name, const NormOp::Options& options,
                                    const Tensor& input, const OptionalTensor& weight,
                                    const OptionalTensor& bias, at::TensorList weights,
                                    const c10::List<OptionalTensor>& biases);

}  // namespace memopt::autograd
