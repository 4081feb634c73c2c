// Softmax, cross entropy and entropy of rows of logits l, and their gradients.
//
//   z_j = s l_j, or c tanh(s l_j / c)              s: logit_scale, c: softcap
//   m = max_j z_j    t_j = z_j - m    L = log sum_j e^t_j    p_j = e^(t_j - L)
//   loss = sum_j q_j (L - t_j) + k (m + L)^2       k: z_loss (Chowdhery et al., arXiv:2204.02311)
//   entropy = L - sum_j p_j t_j
//
// with the target distribution q, smoothed by e (Szegedy et al., arXiv:1512.00567) and weighted by
// class:
//
//   of a class y           q_j = (1 - e) w_y [j = y] + e w_j / cols
//   of probabilities r     q_j = w_j ((1 - e) r_j + e / cols)
//
// Without a target the loss is m + L, the logsumexp.
//
// The gradient of a loss + b entropy, with Q = sum_j q_j (without a target Q = 1, q_j = 0):
//
//   dz_j = a (p_j (Q + 2 k (m + L)) - q_j) - b p_j (t_j - L + entropy)    dl_j = dz_j s (1 -
//   (z_j/c)^2)
//
// Saved for backward: the logits, and L, one number a row (and the entropy, where it is an output).
// m is found again, which takes no exponential: m + L in one number would lose L's digits where
// logits are large. Recomputed: p.
#pragma once

#include "activation.h"

namespace memopt::kernels {

// Rows of `cols` logits. A row's results depend on nothing but the row. Statistics and gradients of
// them are of the type of sums.
struct CrossEntropyParams {
  const void* x;
  void* dx;                   // the gradient of the logits, null if not wanted; may be x itself
  const int64_t* target;      // a class for each row, or null:
  const void* probabilities;  // of the type of sums; null as well: no target
  const void* class_weight;   // [cols], of the type of sums; null: 1
  void* loss;                 // [rows]; these null if not wanted
  void* log_sum;              // L: written, or read if `again`
  void* entropy;              // the same; only where q is not dense
  const void* dloss;          // a for each row; null: 1
  const void* dentropy;       // b for each row; null: 0
  int64_t dloss_stride;       // 0: one number for all rows
  int64_t rows;
  int64_t cols;
  int64_t x_row_stride;
  int64_t dx_row_stride;
  int64_t probabilities_row_stride;
  int64_t ignore_index;  // a row of this class has no loss and no gradient
  double label_smoothing;
  double softcap;  // 0: none
  double logit_scale;
  double z_loss;
  bool again;  // log_sum, and entropy if given, are those of a call before; loss is null
  ScalarType dtype;
};

// Where the sum over q goes over more than one class.
MEMOPT_HD bool is_dense(const CrossEntropyParams& p) {
  return p.probabilities != nullptr || p.label_smoothing != 0;
}

// Where there is no target.
MEMOPT_HD bool is_logsumexp(const CrossEntropyParams& p) {
  return p.target == nullptr && p.probabilities == nullptr;
}

// From a logit to z. A is the type of sums.
template <class A>
struct ScaledLogit {
  A scale;

  template <class V>
  MEMOPT_HD V value(V l) const {
    return l * V(scale);
  }
  template <class V>
  MEMOPT_HD ValueGrad<V> value_and_grad(V l) const {
    return {l * V(scale), V(scale)};
  }
};

template <class A>
struct CappedLogit {
  A scale;
  Softcap cap;

  template <class V>
  MEMOPT_HD V value(V l) const {
    return cap.value(l * V(scale));
  }
  template <class V>
  MEMOPT_HD ValueGrad<V> value_and_grad(V l) const {
    const ValueGrad<V> z = cap.value_and_grad(l * V(scale));
    return {z.value, z.grad * V(scale)};
  }
};

// A distance from the maximum or from the row's sum, d <= 0, where e^d is still the same in float
// and double: -infinity becomes a number, NaN stays.
template <class V>
MEMOPT_HD V limited(V d) {
  return V(0.0f) - Math<V>::clamp_max(V(0.0f) - d, V(1.0e4f));
}

// e^d for a limited d.
template <class V>
MEMOPT_HD V exp_of_limited(V d) {
  return Math<V>::exp2(d * V(1.4426950408889634));
}

// What the gradients of a row share.
template <class A>
struct RowGrad {
  A dloss;     // a
  A q_sum;     // Q
  A of_lse;    // 2 k (m + L), apart from Q: p Q - q may be small beside p Q
  A dentropy;  // b
  A entropy;
};

// dz_j from t_j - L and q_j.
template <class A, class V>
MEMOPT_HD V logit_gradient(const RowGrad<A>& g, V distance, V q) {
  using M = Math<V>;
  const V d = limited(distance);
  const V p = exp_of_limited(d);
  const V of_q = M::fma(p, V(g.q_sum), V(0.0f) - q);
  const V of_loss = V(g.dloss) * M::fma(p, V(g.of_lse), of_q);
  return M::fma(V(-g.dentropy) * p, d + V(g.entropy), of_loss);
}

}  // namespace memopt::kernels
