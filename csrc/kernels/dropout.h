// Dropout (Srivastava et al., JMLR 15, 2014) whose mask is never stored: whether element i is kept
// is a function of the call's seed and offset and of i alone.
//
//   y = x m      dx = dy m      m_i = bits_i >= t ? 1 / (1 - p) : 0      t = round(65536 p)
//
// bits_i: 16 of the 128 bits that Philox (philox.h) gives for the key `seed` and the counter
// (offset / 4, i / 8): half number i mod 8. So 8 neighbours share one Philox call, and p is met to
// 2^-17. It is how PyTorch's CUDA kernels use their generator, with i / 8 for the thread: a call
// takes the numbers of one step of it, 4 of its offset, whatever the tensor's size.
//
// Saved for backward: seed and offset, 16 bytes a call. PyTorch saves a mask: 1 byte an element on
// CUDA, an element's size on the CPU. i is the element's index in the contiguous tensor: not of a
// thread, a vector, a dtype or a device.
//
// What is dropped is multiplied by 0, as in PyTorch: -1 becomes -0, infinities and NaN become NaN.
//
// For a kernel that drops on its way: put a DropoutRule into its Params, make_keeper() at its
// beginning, and multiply by keep_scale(), keep_scales(), or by what cpu/keep_scales.h gives for
// steps and cuda/keep_scales.cuh for shares.
#pragma once

#include "philox.h"

namespace memopt::kernels {

// 16 bits for each of the elements of a group.
constexpr int kDropoutGroup = 8;

// Which elements a call drops, as it travels in a kernel's Params. The state is given by value, or
// read where an earlier kernel left it, so that the host need not wait for it.
struct DropoutRule {
  const int64_t* saved_state;  // [seed, offset] on the kernel's device; null: the next two
  uint64_t seed;
  uint64_t offset;
  uint32_t threshold;
  double scale;
};

inline DropoutRule dropout_rule(double p, const int64_t* saved_state, uint64_t seed,
                                uint64_t offset) {
  const uint32_t threshold = static_cast<uint32_t>(p * 65536.0 + 0.5);
  return {saved_state, seed, offset, threshold, p == 1.0 ? 0.0 : 1.0 / (1.0 - p)};
}

// A rule with its state at hand. V: float, or double for double tensors.
template <class V>
struct Keeper {
  PhiloxKey key;  // the seed
  uint64_t step;  // offset / 4
  uint32_t threshold;
  V scale;
};

template <class V>
MEMOPT_HD Keeper<V> make_keeper(const DropoutRule& rule) {
  uint64_t seed = rule.seed;
  uint64_t offset = rule.offset;
  if (rule.saved_state != nullptr) {
    seed = static_cast<uint64_t>(rule.saved_state[0]);
    offset = static_cast<uint64_t>(rule.saved_state[1]);
  }
  return {{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
          offset / 4,
          rule.threshold,
          static_cast<V>(rule.scale)};
}

// The bits of elements 8 group .. 8 group + 7, two in a word, the lower half first.
template <class V>
MEMOPT_HD PhiloxWords group_bits(const Keeper<V>& keeper, uint64_t group) {
  return philox4x32_10(
      {static_cast<uint32_t>(keeper.step), static_cast<uint32_t>(keeper.step >> 32),
       static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32)},
      keeper.key);
}

template <class V>
MEMOPT_HD V scale_of(const Keeper<V>& keeper, uint32_t bits) {
  return bits >= keeper.threshold ? keeper.scale : V(0);
}
template <class V>
MEMOPT_HD V scale_of_low(const Keeper<V>& keeper, uint32_t word) {
  return scale_of(keeper, word & 0xFFFFu);
}
template <class V>
MEMOPT_HD V scale_of_high(const Keeper<V>& keeper, uint32_t word) {
  return scale_of(keeper, word >> 16);
}

// What element `index` is multiplied by: a Philox call for it alone.
template <class V>
MEMOPT_HD V keep_scale(const Keeper<V>& keeper, uint64_t index) {
  const PhiloxWords w = group_bits(keeper, index / kDropoutGroup);
  const uint32_t place = static_cast<uint32_t>(index % kDropoutGroup);
  const uint32_t low_pair = place & 2 ? w.x1 : w.x0;
  const uint32_t high_pair = place & 2 ? w.x3 : w.x2;
  const uint32_t word = place & 4 ? high_pair : low_pair;
  return scale_of(keeper, (place & 1 ? word >> 16 : word) & 0xFFFFu);
}

// What kWidth neighbours are multiplied by: one Philox call for 8 of them. `index`, the first
// one's, is a multiple of kWidth.
template <int kWidth, class V>
MEMOPT_HD void keep_scales(const Keeper<V>& keeper, uint64_t index, V (&out)[kWidth]) {
  static_assert(kWidth == 2 || kWidth == 4 || kWidth % kDropoutGroup == 0);
  if constexpr (kWidth < kDropoutGroup) {
    PhiloxWords w = group_bits(keeper, index / kDropoutGroup);
    if (index & 4) w = {w.x2, w.x3, w.x0, w.x1};
    if (kWidth == 2 && index & 2) w.x0 = w.x1;
    out[0] = scale_of_low(keeper, w.x0);
    out[1] = scale_of_high(keeper, w.x0);
    if constexpr (kWidth == 4) {
      out[2] = scale_of_low(keeper, w.x1);
      out[3] = scale_of_high(keeper, w.x1);
    }
  } else {
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int j = 0; j < kWidth; j += kDropoutGroup) {
      const PhiloxWords w = group_bits(keeper, (index + j) / kDropoutGroup);
      out[j] = scale_of_low(keeper, w.x0);
      out[j + 1] = scale_of_high(keeper, w.x0);
      out[j + 2] = scale_of_low(keeper, w.x1);
      out[j + 3] = scale_of_high(keeper, w.x1);
      out[j + 4] = scale_of_low(keeper, w.x2);
      out[j + 5] = scale_of_high(keeper, w.x2);
      out[j + 6] = scale_of_low(keeper, w.x3);
      out[j + 7] = scale_of_high(keeper, w.x3);
    }
  }
}

// Forward (x to y) and backward (dy to dx) alike: elements 0 .. size-1 of contiguous arrays.
struct DropoutParams {
  const void* x;
  void* y;  // may be x: in place
  DropoutRule rule;
  int64_t* state;  // null, or on CUDA the place where seed and offset are left for backward
  int64_t size;
  ScalarType dtype;
  bool stream_stores;
};

}  // namespace memopt::kernels
