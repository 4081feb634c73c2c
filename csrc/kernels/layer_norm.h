// LayerNorm over the last dimension of a [rows, cols] matrix (Ba, Kiros & Hinton,
// arXiv:1607.06450), with an activation behind it that is the identity here and GELU in
// layer_norm_gelu.h.
//
//   mean = sum(x) / N        var = sum((x - mean)^2) / N        rstd = 1 / sqrt(var + eps) N = cols
//   xhat = (x - mean) rstd   z = xhat gamma + beta              y = act(z)
//
//   dz = dy act'(z)          dgamma = sum over rows (dz xhat)   dbeta = sum over rows (dz)
//   g = dz gamma             dx = rstd (g - sum(g)/N - xhat sum(g xhat)/N)
//
// Saved for backward: x (2 bytes an element in bfloat16; in a pre-LN model it is the residual
// stream) and the float32 mean and rstd (8 bytes a row). Recomputed: xhat, and z and y where the
// caller asks for the re-emission. The variance is centred: sum(x^2) - N mean^2 would lose all
// digits at mean/std = 1e4. Nothing divides by gamma.
#pragma once

#include "common.h"

namespace memopt::kernels {

// The activation of plain LayerNorm. kNeedsPreactivation says whether backward has to know z, and
// so beta.
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

template <class V>
struct Moments {
  V mean;
  V rstd;
};

// Statistics of a row from its rounded first mean m and the sums over the row of d = x - m and of
// d^2. sum(d) would be zero but for the rounding of m: it corrects both moments (the corrected
// two-pass algorithm of Chan, Golub & LeVeque, 1983), which keeps the float32 error below one
// rounding of the mean.
template <class V>
MEMOPT_HD Moments<V> moments(V m, V sum_d, V sum_d2, int64_t cols, double eps) {
  const V n = static_cast<V>(cols);
  const V shift = sum_d / n;
  const V var = sum_d2 / n - shift * shift;
  const V not_negative = var < V(0) ? V(0) : var;  // NaN stays NaN
  return {m + shift, V(1) / Math<V>::sqrt(not_negative + static_cast<V>(eps))};
}

template <class V>
MEMOPT_HD V normalize(V x, V mean, V rstd) {
  return (x - mean) * rstd;
}

template <class V>
MEMOPT_HD V scale_shift(V xhat, V gamma, V beta) {
  return Math<V>::fma(xhat, gamma, beta);
}

// dx of one element; mean_g = sum(g)/N and mean_gx = sum(g xhat)/N of its row. g is centred before
// it is scaled, so that a row of equal gradients gives zero. The slope is the same for the whole
// row, and compilers take it out of the loop.
template <class V>
MEMOPT_HD V input_grad(V g, V xhat, V mean_g, V mean_gx, V rstd) {
  const V slope = V(0) - rstd * mean_gx;
  return Math<V>::fma(xhat, slope, (g - mean_g) * rstd);
}

// x: [rows, cols] with unit column stride and x_row_stride elements from row to row. y: contiguous.
// gamma, beta: [cols] of param_dtype, either may be null (1 and 0). mean, rstd: [rows] float
// (double for double tensors), both null when no gradient will be asked for.
struct LayerNormForwardParams {
  const void* x;
  const void* gamma;
  const void* beta;
  void* y;
  void* mean;
  void* rstd;
  int64_t rows;
  int64_t cols;
  int64_t x_row_stride;
  double eps;
  ScalarType dtype;
  ScalarType param_dtype;
  bool stream_stores;
};

// Weight gradients are summed in two steps, without atomics: each part (a fixed set of rows) sums
// its own rows into `partials`, then the parts are added in order. So they do not depend on how
// threads are scheduled.
struct LayerNormBackwardParams {
  const void* dy;
  const void* x;
  const void* gamma;
  const void* beta;  // read only for the activation's z and for the re-emission
  const void* mean;
  const void* rstd;
  void* dx;      // contiguous; null: not wanted; may be dy itself when dy is contiguous (in place)
  void* y;       // contiguous; null, or forward's output is re-emitted here, in the same bits
  void* dgamma;  // [cols] of param_dtype; null: not wanted
  void* dbeta;   // likewise
  void* partials;  // [parts, 2, cols] float (double for double tensors): dgamma, dbeta of each
                   // part; null if neither gradient is wanted
  int64_t parts;
  int64_t rows;
  int64_t cols;
  int64_t dy_row_stride;
  int64_t x_row_stride;
  ScalarType dtype;
  ScalarType param_dtype;
  bool stream_stores;
};

}  // namespace memopt::kernels
