// The logistic function s(x) = 1 / (1 + exp(-x)), and the exponential that it and the activations
// are made of, without library functions and without overflow.
#pragma once

#include "common.h"

namespace memopt::kernels {

// s(x) as a quotient: what is multiplied by s is multiplied by `scale` and divided once.
template <class V>
struct Logistic {
  V scale;    // s(x) = scale / divisor
  V tail;     // s(-|x|) = tail / divisor
  V divisor;  // 0.7 to 2.5
};

// With 1 + exp(-x) in hand, and a power of two taken out of both sides for x < 0, so that nothing
// overflows: exp(-x) = 2^n (1 + u), where n is an integer and exp(r) - 1 = u for a remainder |r| <=
// ln(2) / 2, and so
//
//   n <= 0   s = 1 / (1 + (2^n u + 2^n))         n >= 0   s = 2^-n / (1 + (u + 2^-n))
//
// The upper part of ln 2 has so few bits that its product with n is exact, so that r is right
// without a fused multiply-add as well. u by a polynomial (minimax in relative error of 1 + u,
// 4e-9, fitted for this file). Beyond |x| = 104 exp(-|x|) is 0 in float, so |x| stops there and
// stays finite.
template <class V>
struct Reduced {
  V n;  // an integer
  V r;  // exp(-t) = 2^-n exp(r), |r| <= ln(2) / 2
};

template <class V>
MEMOPT_HD Reduced<V> reduced(V t) {
  using M = Math<V>;
  const V magic(12582912.0f);  // 1.5 * 2^23: the sum has no fraction
  const V n = M::fma(t, V(1.4426950409f), magic) - magic;
  return {n, M::fma(n, V(-2.12194440e-4f), M::fma(n, V(0.693359375f), V(0.0f) - t))};
}

// exp(r) - 1
template <class V>
MEMOPT_HD V exp_minus_one(V r) {
  using M = Math<V>;
  V u = M::fma(V(1.3814539e-3f), r, V(8.368745e-3f));
  u = M::fma(u, r, V(4.166839e-2f));
  u = M::fma(u, r, V(1.6666521e-1f));
  u = M::fma(u, r, V(4.9999994e-1f));
  return M::fma(u, r * r, r);
}

template <class V>
MEMOPT_HD Logistic<V> logistic(V x) {
  using M = Math<V>;
  const V zero(0.0f), one(1.0f);
  const Reduced<V> t = reduced(M::clamp_max(M::abs(x), V(104.0f)));
  const V u = exp_minus_one(M::if_negative(x, zero - t.r, t.r));
  const V power = M::power_of_two(zero - t.n);
  const V rest_of_divisor = M::fma(M::if_negative(x, one, power), u, power);
  return {M::if_negative(x, power, one), M::if_negative(x, power, rest_of_divisor),
          one + rest_of_divisor};
}

#if defined(__CUDA_ARCH__)
// On a GPU e = exp(-|x|) from the hardware's exp2, which takes 12 instructions fewer. It is right
// to an ulp where the argument is small: so exp(-|x|) = 2^n exp(r) as above. 2^(n + 24), which is
// no subnormal number, is n moved to where a float has its exponent.
MEMOPT_HD Logistic<float> logistic(float x) {
  const float t = fminf(fabsf(x), 104.0f);
  const float magic = 12582912.0f + 24.0f + 127.0f;
  const float sum = fmaf(t, -1.4426950409f, magic);
  const float n = sum - magic;
  const float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, -t));
  const float power = __int_as_float(__float_as_int(sum) << 23);
  const float exp_r = Math<float>::exp2(r * 1.4426950409f);
  // NaN: the minimum above is 104.
  const float e = x == x ? exp_r * power * 5.9604645e-8f : x;
  return {x < 0 ? e : 1.0f, e, 1.0f + e};
}
#endif

// float64 exists for gradcheck and as an oracle: the library's function, to full precision.
MEMOPT_HD Logistic<double> logistic(double x) {
  const double e = ::exp(-::fabs(x));
  return {x < 0 ? e : 1.0, e, 1.0 + e};
}

// y s(x): one rounding beside those of the quotient.
template <class V>
MEMOPT_HD V times_logistic(V y, const Logistic<V>& f) {
  return Math<V>::divide(y * f.scale, f.divisor);
}

template <class V>
struct LogisticGrad {
  V s;   // s(x)
  V ds;  // s'(x) = s (1 - s)
};

// With q = s(-|x|): s(|x|) = 1 - q, and s' = q - q^2, which keeps its digits in the tails and, near
// 0, does not feel q's error.
template <class V>
MEMOPT_HD LogisticGrad<V> logistic_grad(V x, const Logistic<V>& f) {
  using M = Math<V>;
  const V q = M::divide(f.tail, f.divisor);
  return {M::if_negative(x, q, V(1.0f) - q), M::fma(q, V(0.0f) - q, q)};
}

// max(x, 0), +0 at both zeros, and NaN stays NaN.
template <class V>
MEMOPT_HD V rectify(V x) {
  const V zero(0.0f);
  return zero - Math<V>::clamp_max(zero - x, zero);
}

}  // namespace memopt::kernels
