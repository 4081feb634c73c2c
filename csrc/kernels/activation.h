// Activations: y = f(x) element by element, with f'(x) from the same function.
//
//   silu          f = x s(x)                 f' = s + x s (1 - s)
//   relu          f = max(x, 0)              f' = 1 for x > 0, else 0 (also at 0, as in PyTorch)
//   quick_gelu    f = x s(1.702 x)           f' = s + 1.702 x s (1 - s), s at 1.702 x
//   relu_squared  f = max(x, 0)^2            f' = 2 max(x, 0)
//   sigmoid       f = s(x)                   f' = s (1 - s)
//   gelu          kernels/gelu.h
//
// s(x) = 1 / (1 + exp(-x)) is the logistic function. Sources: SiLU, Elfwing et al.,
// arXiv:1702.03118; quick_gelu, Hendrycks & Gimpel, arXiv:1606.08415, section 2; relu_squared, So
// et al., arXiv:2109.08668.
//
// Saved for backward: x, 2 bytes an element in bfloat16. Recomputed: f(x), which the backward
// kernel writes out again beside the gradient if asked, so that nobody needs to store it.
#pragma once

#include "gelu.h"

namespace memopt::kernels {

template <class V>
struct LogisticGrad {
  V s;   // s(x)
  V ds;  // s'(x) = s (1 - s)
};

// From e = exp(-|x|), which cannot overflow: s(|x|) = 1 / (1 + e), q = s(-|x|) = e / (1 + e), and
// s' = q - q^2, which keeps its digits in the tails and, near 0, does not feel q's error. The
// product |x| log2(e) is rounded before 2^ is taken of it, which would cost |x| roundings of e;
// what it and the rounded log2(e) lack is put back to first order (not on processors whose fma()
// rounds twice). Beyond |x| = 800 s is 0 or 1 in every type, so |x| stops there and stays finite.
template <class V>
MEMOPT_HD LogisticGrad<V> logistic(V x) {
  using M = Math<V>;
  const V t = M::clamp_max(M::abs(x), V(800.0f));
  const V log2_e(1.442695021629333f), log2_e_rest(1.925963033500e-8f), ln_2(0.6931471805599453f);
  const V p = t * log2_e;
  const V lacks = M::fma(t, log2_e_rest, M::fma(t, log2_e, V(0.0f) - p));
  const V rough = M::exp2(V(0.0f) - p);
  const V e = M::fma(rough, V(0.0f) - lacks * ln_2, rough);
  const V r = M::reciprocal(V(1.0f) + e);
  const V q = e * r;
  return {M::if_negative(x, q, r), M::fma(q, V(0.0f) - q, q)};
}

// float64 exists for gradcheck and as an oracle: the library's function, to full precision.
MEMOPT_HD LogisticGrad<double> logistic(double x) {
  const double e = ::exp(-::fabs(x)), r = 1.0 / (1.0 + e);
  return {x < 0 ? e * r : r, e * r * r};
}

// max(x, 0), +0 at both zeros, and NaN stays NaN.
template <class V>
MEMOPT_HD V rectify(V x) {
  const V zero(0.0f);
  return zero - Math<V>::clamp_max(zero - x, zero);
}

struct Silu {
  template <class V>
  static MEMOPT_HD V value(V x) {
    return x * logistic(x).s;
  }

  template <class V>
  static MEMOPT_HD ValueGrad<V> value_and_grad(V x) {
    const LogisticGrad<V> f = logistic(x);
    return {x * f.s, Math<V>::fma(x, f.ds, f.s)};
  }
};

struct Relu {
  template <class V>
  static MEMOPT_HD V value(V x) {
    return rectify(x);
  }

  template <class V>
  static MEMOPT_HD ValueGrad<V> value_and_grad(V x) {
    return {rectify(x), Math<V>::if_positive(x, V(1.0f), V(0.0f))};
  }
};

struct QuickGelu {
  template <class V>
  static MEMOPT_HD V value(V x) {
    return x * logistic(V(1.702) * x).s;
  }

  template <class V>
  static MEMOPT_HD ValueGrad<V> value_and_grad(V x) {
    const LogisticGrad<V> f = logistic(V(1.702) * x);
    // Not (1.702 x) ds: 1.702 x may overflow where ds is 0.
    return {x * f.s, Math<V>::fma(x, V(1.702) * f.ds, f.s)};
  }
};

struct ReluSquared {
  template <class V>
  static MEMOPT_HD V value(V x) {
    const V r = rectify(x);
    return r * r;
  }

  template <class V>
  static MEMOPT_HD ValueGrad<V> value_and_grad(V x) {
    const V r = rectify(x);
    return {r * r, r + r};
  }
};

struct Sigmoid {
  template <class V>
  static MEMOPT_HD V value(V x) {
    return logistic(x).s;
  }

  template <class V>
  static MEMOPT_HD ValueGrad<V> value_and_grad(V x) {
    const LogisticGrad<V> f = logistic(x);
    return {f.s, f.ds};
  }
};

// Whether a zero derivative stops every gradient, infinite ones and NaN too, as PyTorch's threshold
// does.
template <class Function>
constexpr bool kStopsGradient = false;
template <>
inline constexpr bool kStopsGradient<Relu> = true;
template <>
inline constexpr bool kStopsGradient<ReluSquared> = true;

// The gradient of x from the gradient dy of f(x).
template <class Function, class V>
MEMOPT_HD V chain(V dy, V grad) {
  if constexpr (kStopsGradient<Function>) {
    return Math<V>::if_positive(grad, dy * grad, V(0.0f));
  } else {
    return dy * grad;
  }
}

enum class Activation : int32_t {
  kGelu,
  kGeluTanh,
  kSilu,
  kRelu,
  kQuickGelu,
  kReluSquared,
  kSigmoid
};

// f(Silu{}) and so on, for the activation that is named at run time. Host only.
template <class F>
auto with_activation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::kGelu:
      return f(GeluErf{});
    case Activation::kGeluTanh:
      return f(GeluTanh{});
    case Activation::kSilu:
      return f(Silu{});
    case Activation::kRelu:
      return f(Relu{});
    case Activation::kQuickGelu:
      return f(QuickGelu{});
    case Activation::kReluSquared:
      return f(ReluSquared{});
    default:
      return f(Sigmoid{});
  }
}

// Elements 0 .. size-1 of dense arrays. `stream_stores` asks the CPU kernels for non-temporal
// stores: the output is larger than the last-level cache, so reading it in before overwriting it
// would be a third of the traffic.
struct ActivationForwardParams {
  const void* x;
  void* y;
  int64_t size;
  ScalarType dtype;
  Activation activation;
  bool stream_stores;
};

struct ActivationBackwardParams {
  const void* dy;
  const void* x;
  void* dx;  // may be dy itself: in place
  void* y;   // null, or f(x) is re-emitted here, in the same bits as forward wrote
  int64_t size;
  ScalarType dtype;
  Activation activation;
  bool stream_stores;
};

}  // namespace memopt::kernels
