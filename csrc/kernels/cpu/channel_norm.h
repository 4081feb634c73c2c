// What forward and backward of the norms over channels share.
#pragma once

#include "../channel_norm.h"

#include <algorithm>
#include <array>
#include <memory>

#include "cascade.h"
#include "norm_parameters.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

constexpr int kPixelRows = 4;

// body(first row, Rows<kPixelRows>) and, for what is left of the rows, body(row, Rows<1>).
template <int kRows>
struct Rows {
  static constexpr int kCount = kRows;
};
template <class Body>
MEMOPT_INLINE void for_row_groups(int64_t rows, Body&& body) {
  int64_t row = 0;
  for (; row + kPixelRows <= rows; row += kPixelRows) body(row, Rows<kPixelRows>{});
  for (; row < rows; ++row) body(row, Rows<1>{});
}

// Arrays of `channels` numbers each.
template <class A>
class ChannelArrays {
 public:
  ChannelArrays(int64_t count, int64_t channels)
      : channels_(channels), memory_(new A[static_cast<size_t>(count * channels)]) {}
  A* operator[](int64_t i) const { return memory_.get() + i * channels_; }

 private:
  int64_t channels_;
  std::unique_ptr<A[]> memory_;
};

// A number of each set, of which there are `stride` of them side by side, for each channel of a
// sample.
template <class A>
void spread(const ChannelShape& s, int64_t sample, const A* of_set, int64_t stride, A* to) {
  const int64_t each = group_channels(s);
  for (int64_t group = 0; group < s.groups; ++group) {
    const int64_t set = set_of(s, sample, group * each);
    std::fill_n(to + group * each, each, of_set[set * stride]);
  }
}

// Two sums over parts of pixels, for the channels [begin, end): part by part, pairwise. A part has
// kArrays arrays of `channels` numbers. get(a step of each, i, extent, part) says what is added to
// the sums of the step i; take(i, extent, sum, sum) gets them.
template <int kArrays, class A, class Get, class Take>
void sum_parts(const A* parts, int64_t channels, int64_t first, int64_t last, int64_t begin,
               int64_t end, Get get, Take take) {
  using V = typename Elements<A>::V;
  for_steps<A>(begin, end, [&](int64_t i, auto extent) __attribute__((always_inline)) {
    Cascade<V> lo[2], hi[2];
    for (int64_t part = first; part < last; ++part) {
      std::array<Step<V>, kArrays> of_part;
      for (int k = 0; k < kArrays; ++k) {
        of_part[k] = load(parts + (part * kArrays + k) * channels + i, extent);
      }
      const std::array<Step<V>, 2> added = get(of_part, i, extent, part);
      for (int k = 0; k < 2; ++k) {
        lo[k].add(added[k].lo);
        hi[k].add(added[k].hi);
      }
    }
    take(i, extent, Step<V>{lo[0].total(), hi[0].total()}, Step<V>{lo[1].total(), hi[1].total()});
  });
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
