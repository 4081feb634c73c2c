// RMSNorm over the last dimension of a [rows, cols] matrix (Zhang & Sennrich, arXiv:1910.07467).
//
//   ms = sum(x^2) / N       rstd = 1 / sqrt(ms + eps)       N = cols
//   xhat = x rstd           y = xhat s                      s = gamma, or 1 + gamma (zero-centred,
//                                                           as Gemma has it)
//
//   g = dy s                dgamma = sum over rows (dy xhat)
//   dx = rstd (g - xhat sum(g xhat)/N)
//
// Saved for backward: x (2 bytes an element in bfloat16) and the float32 rstd (4 bytes a row).
// Recomputed: xhat, and y where the caller asks for the re-emission. Squares are summed unscaled,
// in float32: they overflow where PyTorch's do, from |x| = 1.8e19 / sqrt(N) on, and then rstd is 0.
// A zero-centred weight keeps its digits near 0, where 1 + gamma in bfloat16 would have 8 bits:
// the sum is made in float32.
#pragma once

#include "common.h"

namespace memopt::kernels {

struct RootMeanSquare {
  static constexpr bool kCentred = false;

  // rstd of a row from the sum of its squares.
  template <class V>
  static MEMOPT_HD V rstd(V sum_x2, int64_t cols, double eps) {
    return V(1) / Math<V>::sqrt(sum_x2 / static_cast<V>(cols) + static_cast<V>(eps));
  }

  template <class V>
  static MEMOPT_HD V normalize(V x, V /*mean*/, V rstd) {
    return x * rstd;
  }

  // offset: 1 for a zero-centred gamma, else 0.
  template <class V>
  static MEMOPT_HD V scale(V gamma, V offset) {
    return gamma + offset;
  }

  template <class V>
  static MEMOPT_HD V affine(V xhat, V scale, V /*beta*/) {
    return xhat * scale;
  }

  // dx of one element; mean_gx = sum(g xhat)/N of its row.
  template <class V>
  static MEMOPT_HD V input_grad(V g, V xhat, V /*mean_g*/, V mean_gx, V rstd) {
    const V slope = V(0) - rstd * mean_gx;
    return Math<V>::fma(xhat, slope, g * rstd);
  }
};

}  // namespace memopt::kernels
