// Sums along a row, in blocks of kSumBlock elements whose sums are added pairwise: rounding grows
// with the logarithm of the row's length, where one running sum a lane would let it grow with the
// length.
#pragma once

#include "sum_lanes.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

// Additions in a row within a block. Without vectors fewer chains share a row, and where one number
// is much larger than the others each addition behind it in its chain rounds by as much.
#if defined(MEMOPT_NO_VECTORS)
constexpr int64_t kSumSteps = 8;
#else
constexpr int64_t kSumSteps = 32;
#endif
template <class T>
constexpr int64_t kSumBlock = kSumSteps * Elements<T>::kStep;

// body(begin, end) for each block of a row of elements of T.
template <class T, class Body>
MEMOPT_INLINE void for_blocks(int64_t cols, Body&& body) {
  for (int64_t begin = 0; begin < cols; begin += kSumBlock<T>) {
    body(begin, cols - begin < kSumBlock<T> ? cols : begin + kSumBlock<T>);
  }
}

// Pairwise addition of numbers that come one by one, as a binary counter carries: level i holds the
// sum of 2^i of them. By default fewer than 2^40: a row of so many blocks does not exist.
template <class A, int kLevels = 40>
class Cascade {
 public:
  MEMOPT_INLINE Cascade() {}

  MEMOPT_INLINE void add(A value) {
    int level = 0;
    for (uint64_t carry = count_; carry & 1; carry >>= 1) value = value + levels_[level++];
    levels_[level] = value;
    ++count_;
  }

  MEMOPT_INLINE A total() const {
    A sum{};
    int level = 0;
    for (uint64_t left = count_; left != 0; left >>= 1, ++level) {
      if (left & 1) sum = sum + levels_[level];
    }
    return sum;
  }

 private:
  uint64_t count_ = 0;
  union {  // of which nothing is written before it is wanted: a vector's constructor writes zeros
    A levels_[kLevels];
  };
};

// The sum of a row of elements of T, of which block(begin, end) has a block's. Most rows of a
// convolutional network's last layers are one block.
template <class T, class Block>
MEMOPT_INLINE auto sum_blocks(int64_t cols, Block&& block) {
  if (cols <= kSumBlock<T>) return block(int64_t{0}, cols);
  Cascade<decltype(block(int64_t{0}, cols))> total;
  for_blocks<T>(cols, [&](int64_t begin, int64_t end) { total.add(block(begin, end)); });
  return total.total();
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
