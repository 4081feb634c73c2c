// Philox4x32-10, the counter-based random generator of Salmon, Moraes, Dror & Shaw ("Parallel
// random numbers: as easy as 1, 2, 3", SC'11): a bijection of 128 bits under a 64-bit key. Number n
// of a stream is computed from n alone, so that any thread can draw any number, at any time, twice.
//
// One round multiplies two of the four words by constants and crosses the halves of the products:
//
//   hi0 lo0 = M0 x0        hi1 lo1 = M1 x2        (32 x 32 -> 64 bits)
//   x' = (hi1 ^ x1 ^ k0,  lo1,  hi0 ^ x3 ^ k1,  lo0)
//
// and the key goes up by two Weyl constants from round to round. Straight-line code on 32-bit
// words: a loop over counters becomes vector instructions, on a GPU it is about 60 instructions.
#pragma once

#include "common.h"

namespace memopt::kernels {

struct PhiloxKey {
  uint32_t k0;
  uint32_t k1;
};

// The counter going in, the random bits coming out.
struct PhiloxWords {
  uint32_t x0;
  uint32_t x1;
  uint32_t x2;
  uint32_t x3;
};

MEMOPT_HD PhiloxWords philox_round(PhiloxWords x, PhiloxKey key) {
  const uint64_t p0 = uint64_t{0xD2511F53u} * x.x0;
  const uint64_t p1 = uint64_t{0xCD9E8D57u} * x.x2;
  return {static_cast<uint32_t>(p1 >> 32) ^ x.x1 ^ key.k0, static_cast<uint32_t>(p1),
          static_cast<uint32_t>(p0 >> 32) ^ x.x3 ^ key.k1, static_cast<uint32_t>(p0)};
}

MEMOPT_HD PhiloxWords philox4x32_10(PhiloxWords counter, PhiloxKey key) {
#if defined(__CUDACC__)
#pragma unroll
#else
#pragma GCC unroll 10
#endif
  for (int round = 0; round < 10; ++round) {
    counter = philox_round(counter, key);
    key = {key.k0 + 0x9E3779B9u, key.k1 + 0xBB67AE85u};
  }
  return counter;
}

}  // namespace memopt::kernels
