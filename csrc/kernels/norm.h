// The norms: what their row kernels are put together from, and the Params. LayerNorm or RMSNorm, an
// activation behind it, and a residual, and dropout, in front of it are fields, not kernels.
//
//   v = x, round(x + residual) or round(x m + residual)                        m: dropout.h
//   xhat = normalize(v)        z = affine(xhat)        y = act(z)
//
//   dz = dy act'(z)            dv = dx of the norm + dsum
//   dx = dresidual = dv, or with dropout dresidual = round(dv), dx = round(dv m)
//
// layer_norm.h and rms_norm.h have the formulas of a row. The norms with an activation are those of
// with_norm() below; any of the rest takes a residual and dropout.
//
// With a residual: what stands between two branches of a pre-LN transformer block. The sum is
// rounded once, to the tensors' type, and it is that rounded sum which is normalised: so both
// outputs have the bits of x + residual and the norm called one after the other. dsum, the sum's
// own gradient, is added before dv is rounded, which saves a rounding of the two steps. In
// elements, forward reads 2 and writes 2 where the two steps read 3 and write 2; backward reads 3
// (v, dy, dsum) and writes 1 where they read 4 and write 2.
//
// With dropout before the residual is added: x m is not rounded, v is fma(x, m, residual) (on
// processors without a fused multiply-add the product is rounded to the type of sums before). dv is
// not rounded before it is multiplied by m. m is a function of row cols + col, the element's index
// in the contiguous tensor. Forward moves what it moves without dropout, backward writes one
// element more. PyTorch's three steps read 5 and write 4 beside a mask, and read 6 and write 3.
//
// Saved for backward: v (with a residual the caller holds it anyway: it is the residual stream),
// the statistics (8 bytes a row, 4 for RMSNorm), and with dropout seed and offset, 16 bytes a call.
// Neither z, x behind a residual, nor a mask. Recomputed: what layer_norm.h and rms_norm.h say.
#pragma once

#include "activation.h"
#include "layer_norm.h"
#include "rms_norm.h"

namespace memopt::kernels {

enum class NormKind : int32_t { kLayerNorm, kRmsNorm };

// No activation.
struct Identity {
  template <class V>
  static MEMOPT_HD V value(V x) {
    return x;
  }
  template <class V>
  static MEMOPT_HD ValueGrad<V> value_and_grad(V x) {
    return {x, V(1)};
  }
};

template <class Statistics_, class Activation_ = Identity>
struct Norm {
  using Statistics = Statistics_;  // Centred or RootMeanSquare: the formulas of a row
  using Activation = Activation_;
  // Whether there are a mean, a beta and its gradient.
  static constexpr bool kCentred = Statistics::kCentred;
  // Whether backward has to know z, and so beta.
  static constexpr bool kActivates = !std::is_same_v<Activation, Identity>;
  // Rows of weight gradients in a part's sums: dgamma, and dbeta.
  static constexpr int kWeightGrads = kCentred ? 2 : 1;
};

// Whether there is a kernel: an activation stands behind LayerNorm alone, and only GELU does.
constexpr bool is_norm(NormKind kind, Activation activation, bool adds) {
  if (activation == Activation::kIdentity) return true;
  return kind == NormKind::kLayerNorm && !adds &&
         (activation == Activation::kGelu || activation == Activation::kGeluTanh);
}

// f(Norm<...>{}) with the kind and the activation that are named at run time. Host only.
template <class Params, class F>
auto with_norm(const Params& p, F&& f) {
  if (p.kind == NormKind::kRmsNorm) return f(Norm<RootMeanSquare>{});
  switch (p.activation.kind) {
    case Activation::kGelu:
      return f(Norm<Centred, GeluErf>{});
    case Activation::kGeluTanh:
      return f(Norm<Centred, GeluTanh>{});
    default:
      return f(Norm<Centred>{});
  }
}

// x: [rows, cols] with unit column stride and x_row_stride elements from row to row. y: contiguous.
// gamma, beta: [cols] of param_dtype, either may be null (1 and 0). mean, rstd: [rows] float
// (double for double tensors), both null when no gradient will be asked for.
struct NormForwardParams {
  const void* x;
  const void* gamma;
  const void* beta;  // not for RMSNorm
  void* y;
  void* mean;  // not for RMSNorm
  void* rstd;
  int64_t rows;
  int64_t cols;
  int64_t x_row_stride;
  double eps;
  ScalarType dtype;
  ScalarType param_dtype;
  bool stream_stores;
  NormKind kind;
  bool zero_centered;  // RMSNorm alone: gamma, where there is one, is the scale less 1
  ActivationSpec activation;
  const void* residual;  // like x; null: none
  int64_t residual_row_stride;
  void* sum;   // with a residual: contiguous; x + residual, rounded once
  bool drops;  // with a residual: x is multiplied by dropout's keep scales before it is added
  DropoutRule rule;
  int64_t* state;  // drops: as DropoutParams has it
};

// Weight gradients are summed in two steps, without atomics: each part (a fixed set of rows) sums
// its own rows into `partials`, then the parts are added in order. So they do not depend on how
// threads are scheduled.
struct NormBackwardParams {
  const void* dy;
  const void* x;  // with a residual the sum that forward wrote
  const void* gamma;
  const void* beta;  // read only for the activation's z and for the re-emission
  const void* mean;
  const void* rstd;
  void* dx;      // contiguous; null: not wanted; may be dy itself when dy is contiguous (in place)
  void* y;       // contiguous; null, or forward's output is re-emitted here, in the same bits
  void* dgamma;  // [cols] of param_dtype; null: not wanted
  void* dbeta;   // likewise; not for RMSNorm
  void* partials;  // [parts, kWeightGrads, cols] float (double for double tensors): dgamma, dbeta
                   // of each part; null if neither gradient is wanted
  int64_t parts;
  int64_t rows;
  int64_t cols;
  int64_t dy_row_stride;
  int64_t x_row_stride;
  ScalarType dtype;
  ScalarType param_dtype;
  bool stream_stores;
  NormKind kind;  // these three as forward's
  bool zero_centered;
  ActivationSpec activation;
  const void* dsum;  // the sum's own gradient, like dy, is added to dx before it is rounded; null:
                     // none
  int64_t dsum_row_stride;
  void* dx_dropped;  // with dropout: x's gradient, where dx is the residual's; null: not wanted
  DropoutRule rule;  // for dx_dropped
};

// What is added to gamma: see RootMeanSquare::scale. A missing gamma is a scale of 1.
template <class Params>
MEMOPT_HD int scale_offset(const Params& p) {
  return p.zero_centered && p.gamma != nullptr ? 1 : 0;
}

}  // namespace memopt::kernels
