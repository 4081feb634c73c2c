// The sum of a vector's lanes, and of two vectors' at once.
#pragma once

#include "vec.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

MEMOPT_INLINE double sum_lanes(double v) {
  return v;
}
#if defined(MEMOPT_NO_VECTORS)
MEMOPT_INLINE float sum_lanes(float v) {
  return v;
}
#else
MEMOPT_INLINE float sum_lanes(FloatVec v) {
  return at::vec::vec_reduce_all<float>([](FloatVec a, FloatVec b) { return a + b; }, v);
}
#endif

// The sums of two vectors' lanes, each as sum_lanes() has it.
template <class A>
struct TwoSums {
  A first;
  A second;

  MEMOPT_INLINE TwoSums operator+(TwoSums other) const {
    return {first + other.first, second + other.second};
  }
};
template <class V>
MEMOPT_INLINE auto sum_lanes(V a, V b) {
  return TwoSums<decltype(sum_lanes(a))>{sum_lanes(a), sum_lanes(b)};
}
#if defined(CPU_CAPABILITY_AVX512)
MEMOPT_INLINE TwoSums<float> sum_lanes(FloatVec a, FloatVec b) {
  // Halves of a beside halves of b, then quarters and within quarters, of both at once.
  __m512 v = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
  v = _mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0xB1));
  v = _mm512_add_ps(v, _mm512_permute_ps(v, 0x4E));
  v = _mm512_add_ps(v, _mm512_permute_ps(v, 0xB1));
  return {_mm512_cvtss_f32(v), _mm_cvtss_f32(_mm512_extractf32x4_ps(v, 2))};
}
#elif defined(CPU_CAPABILITY_AVX2)
MEMOPT_INLINE TwoSums<float> sum_lanes(FloatVec a, FloatVec b) {
  __m256 v = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  v = _mm256_add_ps(v, _mm256_permute_ps(v, 0x4E));
  v = _mm256_add_ps(v, _mm256_permute_ps(v, 0xB1));
  return {_mm256_cvtss_f32(v), _mm_cvtss_f32(_mm256_extractf128_ps(v, 1))};
}
#endif

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
