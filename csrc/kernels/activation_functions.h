// The functions of activation.h, which has their formulas and sources: for each value(), and
// value_and_grad(), which gives f(x) in the same bits. (GELU's are in gelu.h.)
#pragma once

#include <type_traits>

#include "gelu.h"
#include "logistic.h"

namespace memopt::kernels {

struct Silu {
  template <class V>
  static MEMOPT_HD V value(V x) {
    return times_logistic(x, logistic(x));
  }

  template <class V>
  static MEMOPT_HD ValueGrad<V> value_and_grad(V x) {
    const Logistic<V> f = logistic(x);
    const LogisticGrad<V> g = logistic_grad(x, f);
    return {times_logistic(x, f), Math<V>::fma(x, g.ds, g.s)};
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
    return times_logistic(x, logistic(V(1.702) * x));
  }

  template <class V>
  static MEMOPT_HD ValueGrad<V> value_and_grad(V x) {
    const Logistic<V> f = logistic(V(1.702) * x);
    const LogisticGrad<V> g = logistic_grad(x, f);
    // Not (1.702 x) ds: 1.702 x may overflow where ds is 0.
    return {times_logistic(x, f), Math<V>::fma(x, V(1.702) * g.ds, g.s)};
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
    const Logistic<V> f = logistic(x);
    return Math<V>::divide(f.scale, f.divisor);
  }

  template <class V>
  static MEMOPT_HD ValueGrad<V> value_and_grad(V x) {
    const Logistic<V> f = logistic(x);
    return {Math<V>::divide(f.scale, f.divisor), logistic_grad(x, f).ds};
  }
};

// tanh(a) for a = |x| / c: below 1/2 an odd polynomial (Cephes' tanhf, Moshier), which keeps the
// digits of small values; above, 1 - 2 s(-2 a), which is 1 in float long before a = 52.
struct Softcap {
  double cap;

  template <class V>
  MEMOPT_HD V value(V x) const {
    return value_and_grad(x).value;
  }

  template <class V>
  MEMOPT_HD ValueGrad<V> value_and_grad(V x) const {
    using M = Math<V>;
    const V one(1.0f), c(static_cast<float>(cap)), per_cap(static_cast<float>(1.0 / cap));
    const V a = M::clamp_max(M::abs(x) * per_cap, V(52.0f));
    const V z = a * a;
    V p = M::fma(z, V(-5.70498872745e-3f), V(2.06390887954e-2f));
    p = M::fma(z, p, V(-5.37397155531e-2f));
    p = M::fma(z, p, V(1.33314422036e-1f));
    p = M::fma(z, p, V(-3.33332819422e-1f));
    const V small = M::fma(a * z, p, a);
    const V down = a * V(-2.0f);
    const LogisticGrad<V> f = logistic_grad(down, logistic(down));
    const V above = a - V(0.5f);
    const V t = M::if_negative(above, small, M::fma(V(-2.0f), f.s, one));
    const V dt = M::if_negative(above, M::fma(V(0.0f) - small, small, one), V(4.0f) * f.ds);
    return {c * (M::if_negative(x, V(-1.0f), one) * t), dt};
  }

  // float64 exists for gradcheck and as an oracle: the library's function.
  MEMOPT_HD double value(double x) const { return cap * ::tanh(x / cap); }
  MEMOPT_HD ValueGrad<double> value_and_grad(double x) const {
    const double t = ::tanh(x / cap);
    return {cap * t, 1.0 - t * t};
  }
};

struct Relu6 {
  template <class V>
  static MEMOPT_HD V value(V x) {
    return Math<V>::clamp_max(rectify(x), V(6.0f));
  }

  template <class V>
  static MEMOPT_HD ValueGrad<V> value_and_grad(V x) {
    using M = Math<V>;
    const V zero(0.0f);
    return {value(x), M::if_positive(x, M::if_positive(V(6.0f) - x, V(1.0f), zero), zero)};
  }
};

struct LeakyRelu {
  double slope;

  template <class V>
  MEMOPT_HD V value(V x) const {
    return Math<V>::if_positive(x, x, x * rounded<V>());
  }

  template <class V>
  MEMOPT_HD ValueGrad<V> value_and_grad(V x) const {
    using M = Math<V>;
    const V a = rounded<V>();
    // At NaN it is a, as in PyTorch.
    return {value(x), M::if_positive(x, M::if_positive(V(0.0f) - x, a, V(1.0f)), a)};
  }

 private:
  template <class V>
  MEMOPT_HD V rounded() const {
    if constexpr (std::is_same_v<V, double>) {
      return slope;
    } else {
      return V(static_cast<float>(slope));
    }
  }
};

// exp(x) for x < 0 is 2^-n (1 + u), as in logistic(), and so exp(x) - 1 = 2^-n u + (2^-n - 1),
// where nothing cancels: near 0 n is 0. Beyond -104 both are what they are there.
struct Elu {
  double alpha;

  template <class V>
  MEMOPT_HD V value(V x) const {
    return value_and_grad(x).value;
  }

  template <class V>
  MEMOPT_HD ValueGrad<V> value_and_grad(V x) const {
    using M = Math<V>;
    const V zero(0.0f), one(1.0f), a(static_cast<float>(alpha));
    const Reduced<V> t = reduced(M::clamp_max(M::abs(x), V(104.0f)));
    const V u = exp_minus_one(t.r), power = M::power_of_two(zero - t.n);
    const V above = M::if_positive(zero - x, x, one);  // NaN where x is
    return {M::if_positive(x, x, a * M::fma(power, u, power - one)),
            M::if_positive(x, above, a * M::fma(power, u, power))};
  }

  MEMOPT_HD double value(double x) const { return x <= 0 ? alpha * ::expm1(x) : x; }
  MEMOPT_HD ValueGrad<double> value_and_grad(double x) const {
    return {value(x), x > 0 ? 1.0 : alpha * ::exp(x)};
  }
};

// min(max(x + 3, 0), 6) / 6; NaN stays NaN.
template <class V>
MEMOPT_HD V three_pieces(V x) {
  return Math<V>::divide(Math<V>::clamp_max(rectify(x + V(3.0f)), V(6.0f)), V(6.0f));
}

struct Hardsigmoid {
  template <class V>
  static MEMOPT_HD V value(V x) {
    return three_pieces(x);
  }

  // At NaN the derivative is 0, as in PyTorch.
  template <class V>
  static MEMOPT_HD ValueGrad<V> value_and_grad(V x) {
    using M = Math<V>;
    const V zero(0.0f), three(3.0f), t = M::abs(x);
    const V slope = M::divide(V(1.0f), V(6.0f));
    return {value(x), M::if_positive(t - three, zero, M::if_positive(three - t, slope, zero))};
  }
};

struct Hardswish {
  // x is multiplied last: 6 x may overflow.
  template <class V>
  static MEMOPT_HD V value(V x) {
    return x * three_pieces(x);
  }

  template <class V>
  static MEMOPT_HD ValueGrad<V> value_and_grad(V x) {
    using M = Math<V>;
    const V zero(0.0f), three(3.0f);
    const V between = M::divide(x, three) + V(0.5f);
    return {value(x), M::if_positive(x + three, M::if_positive(three - x, between, V(1.0f)), zero)};
  }
};

// With w = exp(-|x|), of t = (e^2 + 2 e) / (e^2 + 2 e + 2) for e = exp(x) both sides by e^2 where
// x > 0:
//
//   t = a / d      t' = 4 k / d^2      x < 0   a = w (w + 2)   d = a + 2         k = w (w + 1)
//                                      x > 0   a = 1 + 2 w     d = a + 2 w^2     k = w^2 (w + 1)
struct Mish {
  template <class V>
  static MEMOPT_HD V value(V x) {
    const Parts<V> f = parts(x);
    return x * Math<V>::divide(f.a, f.d);
  }

  template <class V>
  static MEMOPT_HD ValueGrad<V> value_and_grad(V x) {
    using M = Math<V>;
    const Parts<V> f = parts(x);
    const V t = M::divide(f.a, f.d);
    const V k = f.w * (f.w + V(1.0f)) * M::if_negative(x, V(4.0f), V(4.0f) * f.w);
    return {x * t, M::fma(x, M::divide(M::divide(k, f.d), f.d), t)};
  }

 private:
  template <class V>
  struct Parts {
    V w, a, d;
  };

  template <class V>
  static MEMOPT_HD Parts<V> parts(V x) {
    using M = Math<V>;
    const V two(2.0f), w = exp_of_minus_abs(x);
    const V a = M::if_negative(x, w * (w + two), M::fma(w, two, V(1.0f)));
    return {w, a, a + M::if_negative(x, two, two * w * w)};
  }

  template <class V>
  static MEMOPT_HD V exp_of_minus_abs(V x) {
    using M = Math<V>;
    const Reduced<V> t = reduced(M::clamp_max(M::abs(x), V(104.0f)));
    const V power = M::power_of_two(V(0.0f) - t.n);
    return M::fma(power, exp_minus_one(t.r), power);
  }
  static MEMOPT_HD double exp_of_minus_abs(double x) { return ::exp(-::fabs(x)); }
};

}  // namespace memopt::kernels
