// Many Philox calls at once (kernels/philox.h), in the order of their counters.
//
// A 128-bit lane of a register holds the four words of one call: the multiplication of the even
// 32-bit words by the round's constants gives all of its products, and reversing their order and
// adding (xor) the odd words and the key gives the next counter. Four instructions a round for a
// register, and what comes out lies in memory as it is wanted.
#pragma once

#include "../philox.h"
#include "vec.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

#if defined(CPU_CAPABILITY_AVX512)
struct PhiloxRegister {
  using R = __m512i;
  static constexpr int kCalls = 4;

  static MEMOPT_INLINE R pairs(uint32_t even, uint32_t odd) {
    return _mm512_set4_epi32(0, static_cast<int>(odd), 0, static_cast<int>(even));
  }
  static MEMOPT_INLINE R counters(uint64_t low, uint64_t high) {
    const auto l = static_cast<long long>(low);
    const auto h = static_cast<long long>(high);
    return _mm512_set_epi64(h + 3, l, h + 2, l, h + 1, l, h, l);
  }
  static MEMOPT_INLINE R round(R x, R factors, R key) {
    const R products = _mm512_shuffle_epi32(_mm512_mul_epu32(x, factors), _MM_PERM_ABCD);
    return _mm512_ternarylogic_epi32(products, _mm512_srli_epi64(x, 32), key, 0x96);  // xor
  }
  static MEMOPT_INLINE R add(R a, R b) { return _mm512_add_epi32(a, b); }
  static MEMOPT_INLINE void store(void* p, R x) { _mm512_store_si512(p, x); }
};
#elif defined(CPU_CAPABILITY_AVX2)
struct PhiloxRegister {
  using R = __m256i;
  static constexpr int kCalls = 2;

  static MEMOPT_INLINE R pairs(uint32_t even, uint32_t odd) {
    const int e = static_cast<int>(even);
    const int o = static_cast<int>(odd);
    return _mm256_set_epi32(0, o, 0, e, 0, o, 0, e);
  }
  static MEMOPT_INLINE R counters(uint64_t low, uint64_t high) {
    const auto l = static_cast<long long>(low);
    const auto h = static_cast<long long>(high);
    return _mm256_set_epi64x(h + 1, l, h, l);
  }
  static MEMOPT_INLINE R round(R x, R factors, R key) {
    const R products = _mm256_shuffle_epi32(_mm256_mul_epu32(x, factors), _MM_SHUFFLE(0, 1, 2, 3));
    return _mm256_xor_si256(products, _mm256_xor_si256(_mm256_srli_epi64(x, 32), key));
  }
  static MEMOPT_INLINE R add(R a, R b) { return _mm256_add_epi32(a, b); }
  static MEMOPT_INLINE void store(void* p, R x) { _mm256_store_si256(static_cast<__m256i*>(p), x); }
};
#endif

// The 16-bit halves of philox4x32_10 for high, high + 1, ...: 8 a call, of each word
// the lower half first. low and high: the counter's first and last 64 bits. out: 64-byte aligned.
template <int kCalls>
MEMOPT_INLINE void philox_halves(PhiloxKey key, uint64_t low, uint64_t high, uint16_t* out) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  using P = PhiloxRegister;
  constexpr int kChains = 4;  // as many registers as hide the multiplication's latency
  static_assert(kCalls % (kChains * P::kCalls) == 0);
  const P::R factors = P::pairs(0xD2511F53u, 0xCD9E8D57u);
  const P::R steps = P::pairs(0x9E3779B9u, 0xBB67AE85u);
  for (int i = 0; i < kCalls; i += kChains * P::kCalls) {
    P::R x[kChains];
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) x[c] = P::counters(low, high + i + c * P::kCalls);
    P::R k = P::pairs(key.k0, key.k1);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) x[c] = P::round(x[c], factors, k);
      k = P::add(k, steps);
    }
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) P::store(out + 8 * (i + c * P::kCalls), x[c]);
  }
#else
  for (int i = 0; i < kCalls; ++i) {
    const uint64_t h = high + i;
    const PhiloxWords w =
        philox4x32_10({static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
                       static_cast<uint32_t>(h), static_cast<uint32_t>(h >> 32)},
                      key);
    const uint32_t words[] = {w.x0, w.x1, w.x2, w.x3};
    for (int j = 0; j < 4; ++j) {
      out[8 * i + 2 * j] = static_cast<uint16_t>(words[j]);
      out[8 * i + 2 * j + 1] = static_cast<uint16_t>(words[j] >> 16);
    }
  }
#endif
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
