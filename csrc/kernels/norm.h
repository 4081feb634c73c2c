// What the row kernels of LayerNorm and RMSNorm share: their Params, and the parts that one kernel
// is put together from.
//
//   v = x, or x + residual           xhat = normalize(v)        z = affine(xhat)       y = act(z)
//
//   Statistics   Centred (layer_norm.h) or RootMeanSquare (rms_norm.h): the formulas of a row
//   Activation   Identity, or one of gelu.h
//   kAdds        forward adds a residual and writes the sum, backward adds the sum's own gradient
//                (add_norm.h)
//   kDrops       with kAdds: forward multiplies x by dropout's keep scales before it is added,
//                backward the sum's gradient before it is x's (dropout_add_norm.h)
#pragma once

#include "dropout.h"

namespace memopt::kernels {

// No activation. kNeedsPreactivation says whether backward has to know z, and so beta.
struct Identity {
  static constexpr bool kNeedsPreactivation = false;

  template <class V>
  static MEMOPT_HD V value(V z) {
    return z;
  }
  template <class V>
  static MEMOPT_HD ValueGrad<V> value_and_grad(V z) {
    return {z, V(1)};
  }
};

// Of a row. RMSNorm has no mean: it is 0 and nobody reads it.
template <class V>
struct Moments {
  V mean;
  V rstd;
};

template <class Statistics_, class Activation_ = Identity, bool kAddsResidual = false,
          bool kDropsInput = false>
struct Norm {
  using Statistics = Statistics_;
  using Activation = Activation_;
  static constexpr bool kAdds = kAddsResidual;
  static constexpr bool kDrops = kDropsInput;
  // Whether there are a mean, a beta and its gradient.
  static constexpr bool kCentred = Statistics::kCentred;
  // Rows of weight gradients in a part's sums: dgamma, and dbeta.
  static constexpr int kWeightGrads = kCentred ? 2 : 1;
};

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
  bool zero_centered;    // RMSNorm alone: gamma, where there is one, is the scale less 1
  const void* residual;  // kAdds: like x
  int64_t residual_row_stride;
  void* sum;         // kAdds: contiguous; x + residual, rounded once
  DropoutRule rule;  // kDrops
  int64_t* state;    // kDrops: as DropoutParams has it
};

// Weight gradients are summed in two steps, without atomics: each part (a fixed set of rows) sums
// its own rows into `partials`, then the parts are added in order. So they do not depend on how
// threads are scheduled.
struct NormBackwardParams {
  const void* dy;
  const void* x;  // kAdds: the sum that forward wrote
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
  bool zero_centered;  // as forward's
  const void* dsum;  // kAdds: the sum's own gradient, like dy; is added to dx before it is rounded;
                     // may be null with kDrops
  int64_t dsum_row_stride;
  DropoutRule rule;  // kDrops
  void* dx_dropped;  // kDrops: like dx, which is the residual's gradient: x's. Either may be null
};

}  // namespace memopt::kernels
