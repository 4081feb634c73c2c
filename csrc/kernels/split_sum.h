// Sums of bfloat16 tensors in 24 bits: a float's upper half in one array and the next byte in
// another.
//
// A sum of products that come one after the other needs more digits than a bfloat16 has, and a
// float's upper half is a bfloat16: so the result is where its upper half was, and the sum takes 3
// bytes an element in place of 4, and 2 when it is done. Each addition rounds to 16 significant
// bits, 2^-17 of the sum at most; the result's own rounding is 2^-9 of it.
#pragma once

#include "common.h"

namespace memopt::kernels {

struct SplitSumParams {
  uint16_t* upper;  // of the sum; at the end the bfloat16 result
  uint8_t* lower;
  const uint16_t* x;  // bfloat16 numbers to add; null: the sum is rounded to the result
  int64_t size;
};

MEMOPT_HD float float_of_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}
MEMOPT_HD uint32_t bits_of_float(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// The bits of upper and lower after x is added, rounded to nearest. (A NaN has zeros in its lowest
// byte, since both operands do, and stays what it is.)
MEMOPT_HD uint32_t split_sum(uint32_t upper, uint32_t lower, uint32_t x) {
  const float sum = float_of_bits(upper << 16 | lower << 8) + float_of_bits(x << 16);
  return (bits_of_float(sum) + 0x80u) >> 8;
}

// The bfloat16 nearest to the sum, ties to even; infinity and NaN stay as they are.
MEMOPT_HD uint32_t rounded_sum(uint32_t upper, uint32_t lower) {
  const uint32_t grows = (lower + (upper & 1u)) > 0x80u ? 1u : 0u;
  return (upper & 0x7F80u) == 0x7F80u ? upper : upper + grows;
}

}  // namespace memopt::kernels
