// Activations for values that are rounded to bfloat16, by up to 2^-9 of them: what is right to
// 2^-13 of it takes two thirds of the arithmetic of kernels/activation.h. Derivatives have zeros,
// so that their reciprocals are float's. GELU's, which are summed in float (norm_backward.cpp), are
// as right as ever; what they and the value both need the compiler finds.
#pragma once

#include <type_traits>

#include "../activation.h"
#include "vec.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

// The errors of w, 3.3e-5 of it, of the reciprocal, 6.1e-5, and of the power of two, 2.6e-6, are
// less than 2^-13 together.
struct GeluErfBFloat16 {
  template <class V>
  static MEMOPT_INLINE V value(V x) {
    using M = Math<V>;
    const V t = M::clamped_abs(x, V(16.0f));
    const V k = M::rough_reciprocal(M::fma(V(0.38f), t, V(1.0f)));
    V w = M::fma(V(-0.0886303785f), k, V(0.18512345f));
    w = M::fma(w, k, V(0.0960542072f));
    w = M::fma(w, k, V(0.155777922f));
    w = M::fma(w, k, V(0.151698139f));
    w = M::fma(w, k, V(-3.95011492e-5f));
    return x * M::reflected(x, M::rough_exp2(t * t * V(-0.7213475204f)) * w);
  }

  template <class V>
  static MEMOPT_INLINE ValueGrad<V> value_and_grad(V x) {
    return {value(x), GeluErf::value_and_grad(x).grad};
  }
};

// s(x) = e / (1 + e) where x < 0, and 1 / (1 + e) elsewhere, with
//
//   e = exp(-|x|) = (2^y)^2        y = -|x| / (2 ln 2)
//
// a square, since AVX2's power of two is 0 where it would be subnormal, and there e is still
// wanted. Beyond |x| = 104 e is 0 in float, so |x| stops there and stays finite. The errors of the
// power and of its argument are 2^-16 of e together, and less where e is not small.
template <class V>
MEMOPT_INLINE V exp_of_minus_abs(V x) {
  using M = Math<V>;
  const V root = M::rough_exp2(M::clamp_max(M::abs(x), V(104.0f)) * V(-0.7213475204f));
  return root * root;
}

// y s(x), to 2^-13 of it.
template <class V>
MEMOPT_INLINE V times_rough_logistic(V y, V x, V e) {
  using M = Math<V>;
  return y * M::if_negative(x, e, V(1.0f)) * M::rough_reciprocal(V(1.0f) + e);
}

template <class V>
MEMOPT_INLINE LogisticGrad<V> grad_of_logistic(V x, V e) {
  using M = Math<V>;
  const V q = e * M::reciprocal(V(1.0f) + e);  // s(-|x|)
  return {M::if_negative(x, q, V(1.0f) - q), M::fma(q, V(0.0f) - q, q)};
}

struct SiluBFloat16 {
  template <class V>
  static MEMOPT_INLINE V value(V x) {
    return times_rough_logistic(x, x, exp_of_minus_abs(x));
  }

  template <class V>
  static MEMOPT_INLINE ValueGrad<V> value_and_grad(V x) {
    const LogisticGrad<V> g = grad_of_logistic(x, exp_of_minus_abs(x));
    return {value(x), Math<V>::fma(x, g.ds, g.s)};
  }
};

struct QuickGeluBFloat16 {
  template <class V>
  static MEMOPT_INLINE V value(V x) {
    const V ax = V(1.702f) * x;
    return times_rough_logistic(x, ax, exp_of_minus_abs(ax));
  }

  template <class V>
  static MEMOPT_INLINE ValueGrad<V> value_and_grad(V x) {
    const V ax = V(1.702f) * x;
    const LogisticGrad<V> g = grad_of_logistic(ax, exp_of_minus_abs(ax));
    return {value(x), Math<V>::fma(x, V(1.702f) * g.ds, g.s)};
  }
};

struct SigmoidBFloat16 {
  template <class V>
  static MEMOPT_INLINE V value(V x) {
    return times_rough_logistic(V(1.0f), x, exp_of_minus_abs(x));
  }

  template <class V>
  static MEMOPT_INLINE ValueGrad<V> value_and_grad(V x) {
    return {value(x), grad_of_logistic(x, exp_of_minus_abs(x)).ds};
  }
};

// x s(2u), with the exponential of the derivative: gates need both.
struct GeluTanhBFloat16 {
  template <class V>
  static MEMOPT_INLINE V value(V x) {
    return times_rough_logistic(x, x, GeluTanh::exp_of_minus_2u(GeluTanh::limited_abs(x)));
  }

  template <class V>
  static MEMOPT_INLINE ValueGrad<V> value_and_grad(V x) {
    return {value(x), GeluTanh::value_and_grad(x).grad};
  }
};

template <class Function>
MEMOPT_INLINE Function short_form(const Function& f) {
  return f;
}
MEMOPT_INLINE GeluErfBFloat16 short_form(const GeluErf&) {
  return {};
}
MEMOPT_INLINE GeluTanhBFloat16 short_form(const GeluTanh&) {
  return {};
}
MEMOPT_INLINE SiluBFloat16 short_form(const Silu&) {
  return {};
}
MEMOPT_INLINE QuickGeluBFloat16 short_form(const QuickGelu&) {
  return {};
}
MEMOPT_INLINE SigmoidBFloat16 short_form(const Sigmoid&) {
  return {};
}

// The activation, for values that are rounded to T.
template <class T, class Function>
MEMOPT_INLINE auto rounded_to(const Function& f) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    return short_form(f);
  } else {
    return f;
  }
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
