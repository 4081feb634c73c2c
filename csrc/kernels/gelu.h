// GELU, both forms, and its derivative (Hendrycks & Gimpel, arXiv:1606.08415).
//
//   erf form   (approximate="none")  gelu(x)  = x Phi(x)
//                                    gelu'(x) = Phi(x) + x phi(x)
//   tanh form  (approximate="tanh")  gelu(x)  = x s(2u)
//                                    gelu'(x) = s + x s (1 - s) 2 u'
//
// Phi and phi: the standard normal distribution function and density. s: the logistic function.
// u = sqrt(2/pi) (x + 0.044715 x^3), and 0.5 (1 + tanh u) = s(2u).
//
// Saved for backward: x, 2 bytes an element in bfloat16. Recomputed: gelu(x), which the following
// Linear wants for its weight gradient. value_and_grad() gives it beside the derivative for one
// more multiplication, so the backward kernel can write it out again and nobody needs to store it
// (2 bytes an element).
#pragma once

#include "common.h"

namespace memopt::kernels {

// An activation's value and derivative at one point.
template <class V>
struct ValueGrad {
  V value;
  V grad;
};

// Phi(-t) = exp(-t^2/2) w(t) for t >= 0, where w(t) = erfcx(t / sqrt 2) / 2 is smooth and is fitted
// by a polynomial in k = 1 / (1 + c t) (the form of Abramowitz & Stegun 26.2.17, with coefficients
// fitted for this file). One exponential serves Phi and phi:
//
//   Phi(x) = 1 - e w, and e w where x < 0         t = |x|, e = exp(-t^2 / 2)
//   gelu(x) = x Phi(x)                            gelu'(x) = Phi(x) + x e / sqrt(2 pi)
//
// Beyond t = 16 e is 0 in float, so t stops there and stays finite; infinities and NaN become what
// they are in PyTorch by the factor x of the last steps.
struct GeluErf {
  template <class V>
  static MEMOPT_HD V value(V x) {
    using M = Math<V>;
    const V t = M::clamped_abs(x, V(16.0f));
    return x * M::reflected(x, exp_of_square(t) * w(t));
  }

  template <class V>
  static MEMOPT_HD ValueGrad<V> value_and_grad(V x) {
    using M = Math<V>;
    const V t = M::clamped_abs(x, V(16.0f));
    const V e = exp_of_square(t);
    const V cdf = M::reflected(x, e * w(t));
    return {x * cdf, M::fma(x, V(0.3989422804f) * e, cdf)};
  }

  // float64 exists for gradcheck and as an oracle: the library functions, to full precision.
  static MEMOPT_HD double value(double x) { return x * cdf(x); }
  static MEMOPT_HD ValueGrad<double> value_and_grad(double x) {
    return {x * cdf(x), cdf(x) + x * ::exp(-0.5 * x * x) * 0.39894228040143267794};
  }

 private:
  // By linear programming: |x| times the error of Phi stays below 1.4e-8, a quarter of float's
  // rounding.
  template <class V>
  static MEMOPT_HD V w(V t) {
    using M = Math<V>;
    const V k = M::reciprocal(M::fma(V(0.38f), t, V(1.0f)));
    V w = M::fma(V(0.0543995067f), k, V(-0.2773170168f));
    w = M::fma(w, k, V(0.4456418457f));
    w = M::fma(w, k, V(-0.0862547249f));
    w = M::fma(w, k, V(0.2235539744f));
    w = M::fma(w, k, V(0.1391243051f));
    return M::fma(w, k, V(0.0008520967f));
  }
  template <class V>
  static MEMOPT_HD V exp_of_square(V t) {
    return Math<V>::exp2(t * t * V(-0.7213475204f));
  }
  static MEMOPT_HD double cdf(double x) { return 0.5 * ::erfc(x * -0.70710678118654752440); }
};

struct GeluTanh {
  template <class V>
  struct Logistic {
    V t2;  // x^2, limited
    V s;   // s(2u)
    V ds;  // s'(2u) = s (1 - s)
  };

  // |x|, kept so far from infinity that x^3 is finite: beyond 32 s(2u) is 0 or 1 in every type
  // (also float64).
  template <class V>
  static MEMOPT_HD V limited_abs(V x) {
    return Math<V>::clamp_max(Math<V>::abs(x), V(32));
  }

  // exp(-2|u|) = 2^(-2|u| log2(e)), which cannot overflow, for t = |x|.
  template <class V>
  static MEMOPT_HD V exp_of_minus_2u(V t) {
    using M = Math<V>;
    return M::exp2(t * M::fma(t * t, V(-0.1029432395800235), V(-2.302208198144325)));
  }

  // With e = exp(-2|u|): s(2|u|) = 1 / (1 + e), and s (1 - s) = e / (1 + e)^2, which keeps the
  // digits that 1 - s would lose.
  template <class V>
  static MEMOPT_HD Logistic<V> logistic_2u(V x) {
    using M = Math<V>;
    const V t = limited_abs(x);
    const V t2 = t * t;
    const V e = exp_of_minus_2u(t);
    const V r = M::reciprocal(V(1) + e);
    const V er = e * r;
    return {t2, M::if_negative(x, er, r), er * r};
  }

  template <class V>
  static MEMOPT_HD V value(V x) {
    return x * logistic_2u(x).s;
  }

  template <class V>
  static MEMOPT_HD ValueGrad<V> value_and_grad(V x) {
    using M = Math<V>;
    const Logistic<V> f = logistic_2u(x);
    const V two_du = M::fma(f.t2, V(0.21406444881780076), V(1.5957691216057308));  // 2 u'
    return {x * f.s, M::fma(x * f.ds, two_du, f.s)};
  }
};

}  // namespace memopt::kernels
