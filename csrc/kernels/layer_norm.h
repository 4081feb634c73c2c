// LayerNorm over the last dimension of a [rows, cols] matrix (Ba, Kiros & Hinton,
// arXiv:1607.06450), with an activation behind it: the identity, or GELU. N = cols.
//
//   mean = sum(x) / N         var = sum((x - mean)^2) / N       rstd = 1 / sqrt(var + eps)
//   xhat = (x - mean) rstd    z = xhat gamma + beta             y = act(z)
//
//   dz = dy act'(z)           dgamma = sum over rows (dz xhat)  dbeta = sum over rows (dz)
//   g = dz gamma              dx = rstd (g - sum(g)/N - xhat sum(g xhat)/N)
//
// Saved for backward: x (2 bytes an element in bfloat16; in a pre-LN model it is the residual
// stream) and the float32 mean and rstd (8 bytes a row). Recomputed: xhat, z behind which an
// activation stands (eager PyTorch saves it, 2 bytes an element more), and y where the caller asks
// for the re-emission. The variance is centred: sum(x^2) - N mean^2 would lose all
// digits at mean/std = 1e4. Nothing divides by gamma.
#pragma once

#include "common.h"

namespace memopt::kernels {

// Of a row. RMSNorm has no mean: it is 0 and nobody reads it.
template <class V>
struct Moments {
  V mean;
  V rstd;
};

// The variance of n numbers from the sum of the squares of d = x - m, where the mean is m + shift;
// not negative. NaN stays NaN.
template <class V>
MEMOPT_HD V variance(V shift, V sum_d2, V n) {
  const V var = sum_d2 / n - shift * shift;
  return var < V(0) ? V(0) : var;
}

// Statistics of a row from its rounded first mean m and the sums over the row of d = x - m and of
// d^2. sum(d) would be zero but for the rounding of m: it corrects both moments (the corrected
// two-pass algorithm of Chan, Golub & LeVeque, 1983), which keeps the float32 error below one
// rounding of the mean.
template <class V>
MEMOPT_HD Moments<V> moments(V m, V sum_d, V sum_d2, int64_t cols, double eps) {
  const V n = static_cast<V>(cols);
  const V shift = sum_d / n;
  const V var = variance(shift, sum_d2, n);
  return {m + shift, V(1) / Math<V>::sqrt(var + static_cast<V>(eps))};
}

struct Centred {
  static constexpr bool kCentred = true;

  template <class V>
  static MEMOPT_HD V normalize(V x, V mean, V rstd) {
    return (x - mean) * rstd;
  }

  // gamma as the formulas take it.
  template <class V>
  static MEMOPT_HD V scale(V gamma, V /*offset*/) {
    return gamma;
  }

  template <class V>
  static MEMOPT_HD V affine(V xhat, V gamma, V beta) {
    return Math<V>::fma(xhat, gamma, beta);
  }

  // dx of one element; mean_g = sum(g)/N and mean_gx = sum(g xhat)/N of its row. g is centred
  // before it is scaled, so that a row of equal gradients gives zero. The slope is the same for the
  // whole row, and compilers take it out of the loop.
  template <class V>
  static MEMOPT_HD V input_grad(V g, V xhat, V mean_g, V mean_gx, V rstd) {
    const V slope = V(0) - rstd * mean_gx;
    return Math<V>::fma(xhat, slope, (g - mean_g) * rstd);
  }
};

}  // namespace memopt::kernels
