// The formulas' functions (kernels/common.h) on a vector of floats of the instruction set that is
// being compiled.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <cstdint>

#include "../common.h"

namespace memopt::kernels {

template <>
struct Math<at::vec::Vectorized<float>> {
  using V = at::vec::Vectorized<float>;

  static MEMOPT_INLINE V fma(V a, V b, V c) { return at::vec::fmadd(a, b, c); }
  static MEMOPT_INLINE V abs(V x) { return x.abs(); }
  static MEMOPT_INLINE V clamp_max(V x, V limit) { return at::vec::clamp_max(x, limit); }
  static MEMOPT_INLINE V if_positive(V x, V a, V b) { return V::blendv(a, b, x <= V(0.0f)); }

  // 2^y for y <= 0, within one unit in the last place. (The polynomials of this file are fitted for
  // it, minimax in relative error; this one's is 2e-9.)
  static MEMOPT_INLINE V exp2(V y) {
    return exp2_by(y, 1.5353361789e-4f, 1.3398874378e-3f, 9.6184373584e-3f, 5.5503324713e-2f,
                   2.4022647914e-1f, 6.9314720285e-1f, 1.0f);
  }
  // The same, with an error of 2.6e-6 of it.
  static MEMOPT_INLINE V rough_exp2(V y) {
    return exp2_by(y, 9.57010574e-3f, 5.59178717e-2f, 2.40247448e-1f, 6.93121813e-1f,
                   9.99999261e-1f);
  }

#if defined(CPU_CAPABILITY_AVX512)
  // For finite x >= 1/2, with an error of 2^-14 of it.
  static MEMOPT_INLINE V rough_reciprocal(V x) { return _mm512_rcp14_ps(x); }
  // For finite x >= 1/2: the hardware's 14 bits and one Newton step, a third of a division's time.
  static MEMOPT_INLINE V reciprocal(V x) {
    const V r = _mm512_rcp14_ps(x);
    return fma(r, V(_mm512_fnmadd_ps(x, r, _mm512_set1_ps(1.0f))), r);
  }
  // a / b for such b. What the first quotient lacks is NaN where a is infinite, and is left away.
  static MEMOPT_INLINE V divide(V a, V b) {
    const V r = _mm512_rcp14_ps(b);
    const V q = a * r;
    const V lacks = _mm512_fnmadd_ps(q, b, a);
    return _mm512_mask3_fmadd_ps(lacks, r, q, _mm512_cmp_ps_mask(lacks, lacks, _CMP_ORD_Q));
  }
  // 2^n for an integer n <= 0, subnormal ones too.
  static MEMOPT_INLINE V power_of_two(V n) { return _mm512_scalef_ps(V(1.0f), n); }
  static MEMOPT_INLINE V if_negative(V sign, V a, V b) {
    return _mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(sign)), b, a);
  }
  static MEMOPT_INLINE V clamped_abs(V x, V limit) {
    return _mm512_range_ps(x, limit, 0b1010);  // 10: without its sign; 10: of the lesser length
  }
  static MEMOPT_INLINE V reflected(V x, V p) {
    const __mmask16 is_positive =
        _mm512_cmp_epi32_mask(_mm512_castps_si512(x), _mm512_setzero_si512(), _MM_CMPINT_NLT);
    return _mm512_mask_sub_ps(p, is_positive, _mm512_set1_ps(1.0f), p);
  }

 private:
  static MEMOPT_INLINE V scale_by_power(V p, V n) { return _mm512_scalef_ps(p, n); }
#else
  static MEMOPT_INLINE V rough_reciprocal(V x) { return V(1.0f) / x; }
  static MEMOPT_INLINE V reciprocal(V x) { return V(1.0f) / x; }
  static MEMOPT_INLINE V divide(V a, V b) { return a / b; }
  // In two steps, of which the second may round to a subnormal number.
  static MEMOPT_INLINE V power_of_two(V n) {
    const V first = at::vec::maximum(n, V(-100.0f));
    return normal_power(first) * normal_power(n - first);
  }
#if defined(CPU_CAPABILITY_AVX2)
  static MEMOPT_INLINE V if_negative(V sign, V a, V b) { return _mm256_blendv_ps(b, a, sign); }
#else
  static MEMOPT_INLINE V if_negative(V sign, V a, V b) { return V::blendv(b, a, sign < V(0.0f)); }
#endif
  static MEMOPT_INLINE V clamped_abs(V x, V limit) { return clamp_max(abs(x), limit); }
  static MEMOPT_INLINE V reflected(V x, V p) { return if_negative(x, p, V(1.0f) - p); }

 private:
  // Adds n to the exponent's bits; 0 where the result would be subnormal. (Adding 1.5 * 2^23 leaves
  // n in the sum's low bits.)
  static MEMOPT_INLINE V scale_by_power(V p, V n) {
    using Bits = at::vec::Vectorized<int32_t>;
    const Bits exponent = at::vec::cast<int32_t>(n + V(12582912.0f)) << Bits(23);
    const V y = at::vec::cast<float>(at::vec::cast<int32_t>(p) + exponent);
    return V::blendv(y, V(0.0f), n < V(-125.0f));
  }
  // 2^n for -126 <= n <= 0.
  static MEMOPT_INLINE V normal_power(V n) {
    using Bits = at::vec::Vectorized<int32_t>;
    return at::vec::cast<float>(at::vec::cast<int32_t>(n + V(12582912.0f + 127.0f)) << Bits(23));
  }
#endif

  // y = n + f with n an integer and |f| <= 1/2: 2^n times a polynomial for 2^f, whose coefficients
  // stand from the highest on.
  template <typename... Lower>
  static MEMOPT_INLINE V exp2_by(V y, float highest, Lower... lower) {
    const V n = y.round();
    const V f = y - n;
    V p(highest);
    ((p = fma(p, f, V(lower))), ...);
    return scale_by_power(p, n);
  }
};

}  // namespace memopt::kernels
