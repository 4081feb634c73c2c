// Element types and vectors of the instruction set that this file is being compiled for.
//
// The build compiles every kernel source three times and defines, each time, the macros that select
// at::vec's implementation and MEMOPT_CPU_NAMESPACE (baseline, avx2, avx512), the namespace that
// keeps the copies apart.
//
// A step is kStep elements, held as two vectors of accumulators: one vector register of half or
// bfloat16 elements widens to two of floats, and two independent chains hide latency. Kernels are
// written over steps and a tail; the tail runs the same vector arithmetic on fewer lanes, so no
// element's value depends on where its array starts or ends.
//
// The baseline of x86 has no vectors: only processors from before 2013 run it, at::vec's vectors
// are arrays there, and with them it took as long to compile as both other copies.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__) && !defined(CPU_CAPABILITY_AVX2) && !defined(CPU_CAPABILITY_AVX512)
#define MEMOPT_NO_VECTORS
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "../common.h"
#else
#include "vec_math.h"
#endif

namespace memopt::kernels {

namespace cpu::MEMOPT_CPU_NAMESPACE {

#if !defined(MEMOPT_NO_VECTORS)
using FloatVec = at::vec::Vectorized<float>;
#endif

template <class V>
struct Step {
  V lo;
  V hi;
};

// How elements of type T are read into accumulators and written back, kStep at a time or, for a
// tail, `count` of them (reading zeros beyond). stream() bypasses the caches and needs 64-byte
// aligned addresses. rounded() is a step as it would be read after it was written.
template <class T>
struct Elements;

#if defined(MEMOPT_NO_VECTORS)
constexpr int64_t kStreamBytes = 16;
#else
constexpr int64_t kStreamBytes = sizeof(FloatVec);
#endif

// Copies kStreamBytes past the caches.
MEMOPT_INLINE void stream_vector(void* to, const void* aligned_from) {
#if defined(CPU_CAPABILITY_AVX512)
  _mm512_stream_si512(static_cast<__m512i*>(to), *static_cast<const __m512i*>(aligned_from));
#elif defined(CPU_CAPABILITY_AVX2)
  _mm256_stream_si256(static_cast<__m256i*>(to), *static_cast<const __m256i*>(aligned_from));
#else
  std::memcpy(to, aligned_from, kStreamBytes);
#endif
}

// Orders streamed stores before the thread's later ones (the end of a parallel loop).
MEMOPT_INLINE void stream_fence() {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  _mm_sfence();
#endif
}

// A step of two plain numbers. float64 has it everywhere: it serves gradcheck, and the library's
// erfc and exp do the rest.
template <class T>
struct PlainElements {
  using V = Accumulate<T>;
  static constexpr int64_t kStep = 2;

  static MEMOPT_INLINE Step<V> load(const T* p) {
    return {static_cast<V>(p[0]), static_cast<V>(p[1])};
  }
  static MEMOPT_INLINE Step<V> load(const T* p, int64_t) { return {static_cast<V>(p[0]), V(0)}; }
  static MEMOPT_INLINE void store(T* p, Step<V> s) {
    p[0] = static_cast<T>(s.lo);
    p[1] = static_cast<T>(s.hi);
  }
  static MEMOPT_INLINE void store(T* p, Step<V> s, int64_t) { p[0] = static_cast<T>(s.lo); }
  static MEMOPT_INLINE void stream(T* p, Step<V> s) { store(p, s); }
  static MEMOPT_INLINE Step<V> rounded(Step<V> s) { return {V(T(s.lo)), V(T(s.hi))}; }
};

template <>
struct Elements<double> : PlainElements<double> {};

#if defined(MEMOPT_NO_VECTORS)
template <>
struct Elements<float> : PlainElements<float> {};
template <>
struct Elements<c10::BFloat16> : PlainElements<c10::BFloat16> {};
template <>
struct Elements<c10::Half> : PlainElements<c10::Half> {};
#else
template <>
struct Elements<float> {
  using V = FloatVec;
  static constexpr int64_t kStep = 2 * V::size();

  static MEMOPT_INLINE Step<V> load(const float* p) {
    return {V::loadu(p), V::loadu(p + V::size())};
  }
  static MEMOPT_INLINE void store(float* p, Step<V> s) {
    s.lo.store(p);
    s.hi.store(p + V::size());
  }
#if defined(CPU_CAPABILITY_AVX512)
  // Without branches: a tail is a good part of what a short row takes.
  static MEMOPT_INLINE Step<V> load(const float* p, int64_t count) {
    return {_mm512_maskz_loadu_ps(lo_lanes(count), p),
            _mm512_maskz_loadu_ps(hi_lanes(count), p + V::size())};
  }
  static MEMOPT_INLINE void store(float* p, Step<V> s, int64_t count) {
    _mm512_mask_storeu_ps(p, lo_lanes(count), s.lo);
    if (count > V::size()) _mm512_mask_storeu_ps(p + V::size(), hi_lanes(count), s.hi);
  }
  static MEMOPT_INLINE __mmask16 lo_lanes(int64_t count) {
    return static_cast<__mmask16>((uint32_t{1} << count) - 1);
  }
  static MEMOPT_INLINE __mmask16 hi_lanes(int64_t count) {
    return static_cast<__mmask16>(((uint32_t{1} << count) - 1) >> 16);
  }
#else
  static MEMOPT_INLINE Step<V> load(const float* p, int64_t count) {
    const int64_t n = V::size();
    if (count <= n) return {V::loadu(p, count), V(0.0f)};
    return {V::loadu(p), V::loadu(p + n, count - n)};
  }
  static MEMOPT_INLINE void store(float* p, Step<V> s, int64_t count) {
    const int64_t n = V::size();
    s.lo.store(p, static_cast<int>(count < n ? count : n));
    if (count > n) s.hi.store(p + n, static_cast<int>(count - n));
  }
#endif
  static MEMOPT_INLINE void stream(float* p, Step<V> s) {
    stream_vector(p, &s.lo);
    stream_vector(p + V::size(), &s.hi);
  }
  static MEMOPT_INLINE Step<V> rounded(Step<V> s) { return s; }
};

// half and bfloat16: Convert widens a whole register to two of floats and narrows them back.
template <class T, class Convert>
struct NarrowElements {
  using V = FloatVec;
  using Narrow = at::vec::Vectorized<T>;
  static constexpr int64_t kStep = Narrow::size();

  static MEMOPT_INLINE Step<V> load(const T* p) { return Convert::widen(Narrow::loadu(p)); }
  static MEMOPT_INLINE Step<V> load(const T* p, int64_t count) {
    return Convert::widen(Narrow::loadu(p, count));
  }
  static MEMOPT_INLINE void store(T* p, Step<V> s) { Convert::narrow(s).store(p); }
  static MEMOPT_INLINE void store(T* p, Step<V> s, int64_t count) {
    Convert::narrow(s).store(p, static_cast<int>(count));
  }
  static MEMOPT_INLINE void stream(T* p, Step<V> s) {
    const Narrow v = Convert::narrow(s);
    stream_vector(p, &v);
  }
  static MEMOPT_INLINE Step<V> rounded(Step<V> s) { return Convert::widen(Convert::narrow(s)); }
};

template <class T>
struct InOrder {
  static MEMOPT_INLINE Step<FloatVec> widen(at::vec::Vectorized<T> v) {
    auto [lo, hi] = at::vec::convert_to_float<T>(v);
    return {lo, hi};
  }
  static MEMOPT_INLINE at::vec::Vectorized<T> narrow(Step<FloatVec> s) {
    return at::vec::convert_from_float<T>(s.lo, s.hi);
  }
};

template <>
struct Elements<c10::BFloat16> : NarrowElements<c10::BFloat16, InOrder<c10::BFloat16> > {};
template <>
struct Elements<c10::Half> : NarrowElements<c10::Half, InOrder<c10::Half> > {};
#endif

// Elements whose lanes may stand in any order within a step, as an elementwise kernel's may.
template <class T>
struct UnorderedElements : Elements<T> {
  // A step whose lanes are in order, as this one has them.
  template <class V>
  static MEMOPT_INLINE Step<V> arrange(Step<V> s) {
    return s;
  }
};

#if !defined(MEMOPT_NO_VECTORS)
// bfloat16 is then taken apart and put together in half the instructions: a 32-bit lane holds two
// neighbours, and each is the upper half of a float already. lo gets the even elements and hi the
// odd ones.
struct EvenOdd {
  using V = FloatVec;
  using Narrow = at::vec::Vectorized<c10::BFloat16>;

#if defined(CPU_CAPABILITY_AVX512)
  static MEMOPT_INLINE Step<V> widen(Narrow v) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(v, upper()))};
  }
  // To nearest, ties to even. The upper halves, which are bfloat16 numbers already, and the lower
  // halves, by which they grow by one, each in one register. A NaN of arithmetic on bfloat16
  // numbers has a lower half of 0, and stays as it is.
  static MEMOPT_INLINE Narrow narrow(Step<V> s) {
    const __m512i even = _mm512_castps_si512(s.lo), odd = _mm512_castps_si512(s.hi);
    const __m512i top = _mm512_mask_blend_epi16(kOdd, _mm512_srli_epi32(even, 16), odd);
    const __m512i low = _mm512_mask_blend_epi16(kOdd, even, _mm512_slli_epi32(odd, 16));
    const __m512i last_bit = _mm512_set1_epi16(1), half = _mm512_set1_epi16(-0x8000);
    // Above a half, or just a half on an odd number.
    const __m512i rest = _mm512_ternarylogic_epi32(low, top, last_bit, 0xF8);  // low | (top & 1)
    const __mmask32 grows = _mm512_cmpgt_epu16_mask(rest, half);
    return Narrow(_mm512_mask_add_epi16(top, grows, top, last_bit));
  }

 private:
  static constexpr __mmask32 kOdd = 0xAAAAAAAA;
  static MEMOPT_INLINE __m512i upper() { return _mm512_set1_epi32(static_cast<int>(0xFFFF0000u)); }
#elif defined(CPU_CAPABILITY_AVX2)
  static MEMOPT_INLINE Step<V> widen(Narrow v) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(v, 16)),
            _mm256_castsi256_ps(_mm256_blend_epi16(_mm256_setzero_si256(), v, 0xAA))};
  }
  static MEMOPT_INLINE Narrow narrow(Step<V> s) {
    return Narrow(_mm256_blend_epi16(_mm256_srli_epi32(round(s.lo), 16), round(s.hi), 0xAA));
  }

 private:
  static MEMOPT_INLINE __m256i round(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    const __m256i rounded = _mm256_add_epi32(bits, half);
    return _mm256_blendv_epi8(rounded, bits,
                              _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  }
#else
  static MEMOPT_INLINE Step<V> widen(Narrow v) { return InOrder<c10::BFloat16>::widen(v); }
  static MEMOPT_INLINE Narrow narrow(Step<V> s) { return InOrder<c10::BFloat16>::narrow(s); }
#endif
};
template <>
struct UnorderedElements<c10::BFloat16> : NarrowElements<c10::BFloat16, EvenOdd> {
  static MEMOPT_INLINE Step<V> arrange(Step<V> s) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
    const auto [even, odd] = at::vec::deinterleave2<float>(s.lo, s.hi);
    return {even, odd};
#else
    return s;
#endif
  }
};
#endif

// How many elements a step really holds: all kStep of them (known to the compiler), or the count of
// a tail.
struct Whole {};
struct Tail {
  int64_t count;
};

// A step at p, read and written as E does: Elements<T> unless said otherwise.
template <class E, class T>
MEMOPT_INLINE Step<typename E::V> load(const T* p, Whole) {
  return E::load(p);
}
template <class E, class T>
MEMOPT_INLINE Step<typename E::V> load(const T* p, Tail tail) {
  return E::load(p, tail.count);
}
template <class T, class Extent>
MEMOPT_INLINE Step<typename Elements<T>::V> load(const T* p, Extent extent) {
  return load<Elements<T>, T>(p, extent);
}

template <class E, class T, class V>
MEMOPT_INLINE void store(T* p, Step<V> s, Whole, bool streamed = false) {
  if (streamed) {
    E::stream(p, s);
  } else {
    E::store(p, s);
  }
}
template <class E, class T, class V>
MEMOPT_INLINE void store(T* p, Step<V> s, Tail tail, bool = false) {
  E::store(p, s, tail.count);
}
template <class T, class V, class Extent>
MEMOPT_INLINE void store(T* p, Step<V> s, Extent extent, bool streamed = false) {
  store<Elements<T>, T, V>(p, s, extent, streamed);
}

// Zero in the lanes past a tail's end.
template <class V>
MEMOPT_INLINE Step<V> keep_valid(Step<V> s, Whole) {
  return s;
}
template <class V>
MEMOPT_INLINE Step<V> keep_valid(Step<V> s, Tail) {  // a tail of a plain step is its first number
  return {s.lo, V(0)};
}
#if !defined(MEMOPT_NO_VECTORS)
MEMOPT_INLINE Step<FloatVec> keep_valid(Step<FloatVec> s, Tail tail) {
#if defined(CPU_CAPABILITY_AVX512)
  return {_mm512_maskz_mov_ps(Elements<float>::lo_lanes(tail.count), s.lo),
          _mm512_maskz_mov_ps(Elements<float>::hi_lanes(tail.count), s.hi)};
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i count = _mm256_set1_epi32(static_cast<int>(tail.count));
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i lo = _mm256_cmpgt_epi32(count, lanes);
  const __m256i hi = _mm256_cmpgt_epi32(count, _mm256_add_epi32(lanes, _mm256_set1_epi32(8)));
  return {_mm256_and_ps(s.lo, _mm256_castsi256_ps(lo)),
          _mm256_and_ps(s.hi, _mm256_castsi256_ps(hi))};
#else
  const int64_t n = FloatVec::size();
  const FloatVec zero(0.0f);
  return {FloatVec::set(zero, s.lo, tail.count),
          FloatVec::set(zero, s.hi, tail.count < n ? 0 : tail.count - n)};
#endif
}
#endif

// body(offset, Whole) for every whole step of the elements [begin, end) of T, then body(offset,
// Tail) for what is left.
template <class T, class Body>
MEMOPT_INLINE void for_steps(int64_t begin, int64_t end, Body&& body) {
  constexpr int64_t kStep = Elements<T>::kStep;
  int64_t i = begin;
  for (; i + kStep <= end; i += kStep) body(i, Whole{});
  if (i < end) body(i, Tail{end - i});
}

// Calls body(offset, in, out, count) for the n elements of some arrays, of which any may be null:
// for all whole steps at once, and for what is left with a step of copies. So an elementwise kernel
// has one body, for whole steps.
template <class T, size_t kIn, size_t kOut, class Body>
MEMOPT_INLINE void for_whole_steps(int64_t n, const std::array<const T*, kIn>& in,
                                   const std::array<T*, kOut>& out, Body&& body) {
  constexpr int64_t kStep = Elements<T>::kStep;
  const int64_t whole = n / kStep * kStep, left = n - whole;
  if (whole > 0) body(int64_t{0}, in, out, whole);
  if (left == 0) return;
  alignas(64) T copies[kIn + kOut][kStep] = {};
  std::array<const T*, kIn> from = {};
  std::array<T*, kOut> to = {};
  for (size_t i = 0; i < kIn; ++i) {
    if (in[i] == nullptr) continue;
    std::copy_n(in[i] + whole, left, copies[i]);
    from[i] = copies[i];
  }
  for (size_t i = 0; i < kOut; ++i) {
    if (out[i] != nullptr) to[i] = copies[kIn + i];
  }
  body(whole, from, to, kStep);
  for (size_t i = 0; i < kOut; ++i) {
    if (out[i] != nullptr) std::copy_n(to[i], left, out[i] + whole);
  }
}

MEMOPT_INLINE bool is_aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 64 == 0;
}

// f(T()) with the C++ type that `dtype` names. float64 has no vectors: one copy of its kernels
// serves AVX2 and AVX-512 (table.cpp).
template <class F>
void with_type(ScalarType dtype, F f) {
  switch (dtype) {
    case ScalarType::kFloat:
      return f(float());
    case ScalarType::kHalf:
      return f(c10::Half());
    case ScalarType::kBFloat16:
      return f(c10::BFloat16());
    case ScalarType::kDouble:
#if !defined(CPU_CAPABILITY_AVX512)
      return f(double());
#else
      return;
#endif
  }
}

}  // namespace cpu::MEMOPT_CPU_NAMESPACE
}  // namespace memopt::kernels
