// What every kernel header shares: element types, the host/device marker, and the handful of scalar
// functions that the formulas are written in.
//
// Nothing in this folder knows PyTorch. The formulas (gelu.h, layer_norm.h) are templates over a
// "number" V: float or double for one element (CUDA threads, the SIMT interpreter, float64 on the
// CPU), or a vector of floats (cpu/vec.h specialises Math for it). All builds switch floating-point
// contraction off (-ffp-contract=off, nvcc -fmad=false) and the formulas say fma() where they mean
// it: so forward, and the backward kernel that re-emits forward's output, round alike wherever the
// compiler inlines them.
#pragma once

#include <cmath>
#include <cstdint>

#define MEMOPT_INLINE inline __attribute__((always_inline))
#if defined(__CUDACC__)
#define MEMOPT_HD __host__ __device__ __forceinline__
#else
#define MEMOPT_HD MEMOPT_INLINE
#endif

namespace memopt::kernels {

// The element types of tensors. Parameters (gamma, beta) have the tensor's type or kFloat.
enum class ScalarType : int32_t { kFloat, kHalf, kBFloat16, kDouble };

// Statistics and sums are float, or double for double tensors.
template <class T>
struct AccumulateType {
  using type = float;
};
template <>
struct AccumulateType<double> {
  using type = double;
};
template <class T>
using Accumulate = typename AccumulateType<T>::type;

MEMOPT_HD int64_t ceil_div(int64_t n, int64_t d) {
  return (n + d - 1) / d;
}

// The functions that the formulas need of a number type V.
template <class V>
struct Math;

template <>
struct Math<float> {
  static MEMOPT_HD float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
  static MEMOPT_HD float abs(float x) { return ::fabsf(x); }
  // 2^x for x <= 0. On a GPU the hardware's, right to 2 ulp and 0 below 2^-126: one instruction,
  // where e^x takes eight and a 2^x that keeps subnormal results four.
  static MEMOPT_HD float exp2(float x) {
#if defined(__CUDA_ARCH__)
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
#else
    return ::exp2f(x);
#endif
  }
  static MEMOPT_HD float rough_exp2(float x) { return exp2(x); }
  // 2^n for an integer n <= 0.
  static MEMOPT_HD float power_of_two(float n) { return exp2(n); }
  static MEMOPT_HD float sqrt(float x) { return ::sqrtf(x); }
  // 1 / x for x >= 1/2. On a GPU the hardware's, right to one ulp and 0 from 2^126 on: the
  // correctly rounded quotient takes a branch and ten instructions, a third of what memory traffic
  // leaves time for. (There is an intrinsic for neither.)
  static MEMOPT_HD float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
#else
    return 1.0f / x;
#endif
  }
  static MEMOPT_HD float rough_reciprocal(float x) { return reciprocal(x); }
  // a / b for 1/2 <= b, finite. On a GPU from 1 / b and what the product with it lacks,
  // which is NaN where a is infinite.
  static MEMOPT_HD float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
    const float r = reciprocal(b), q = a * r;
    const float lacks = fma(-q, b, a);
    return lacks == lacks ? fma(lacks, r, q) : q;
#else
    return a / b;
#endif
  }
  // x < limit ? x : limit, and NaN stays NaN.
  static MEMOPT_HD float clamp_max(float x, float limit) { return x > limit ? limit : x; }
  // a where the sign bit is set (also -0), else b.
  static MEMOPT_HD float if_negative(float sign, float a, float b) { return sign < 0 ? a : b; }
  // min(|x|, limit); the limit or NaN where x is NaN.
  static MEMOPT_HD float clamped_abs(float x, float limit) { return clamp_max(abs(x), limit); }
  // p where x's sign bit is set, else 1 - p.
  static MEMOPT_HD float reflected(float x, float p) { return if_negative(x, p, 1.0f - p); }
  // a where x > 0 or x is NaN, else b.
  static MEMOPT_HD float if_positive(float x, float a, float b) { return x <= 0 ? b : a; }
};

template <>
struct Math<double> {
  static MEMOPT_HD double fma(double a, double b, double c) { return ::fma(a, b, c); }
  static MEMOPT_HD double abs(double x) { return ::fabs(x); }
  static MEMOPT_HD double exp2(double x) { return ::exp2(x); }
  static MEMOPT_HD double sqrt(double x) { return ::sqrt(x); }
  static MEMOPT_HD double reciprocal(double x) { return 1.0 / x; }
  static MEMOPT_HD double divide(double a, double b) { return a / b; }
  static MEMOPT_HD double clamp_max(double x, double limit) { return x > limit ? limit : x; }
  static MEMOPT_HD double if_negative(double sign, double a, double b) { return sign < 0 ? a : b; }
  static MEMOPT_HD double if_positive(double x, double a, double b) { return x <= 0 ? b : a; }
};

}  // namespace memopt::kernels
