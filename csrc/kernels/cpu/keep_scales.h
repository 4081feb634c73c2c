// What elements are multiplied by under dropout, by steps: for any kernel that walks over
// neighbouring elements.
//
//   KeepScales<T> scales(make_keeper<Accumulate<T>>(p.rule));
//   ... const auto keep = scales.at(index);  x.lo * keep.lo, x.hi * keep.hi
//
// They are made kBlock at a time and lie in the L1 cache until they are used. A block begins at any
// group of 8, so a row may begin at any index; walking upwards wastes less than a step and a group
// of a block.
#pragma once

#include "../dropout.h"
#include "philox.h"
#include "vec.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

template <class T>
class KeepScales {
  using A = Accumulate<T>;
  using E = Elements<A>;  // the accumulators of a step are as many as T's elements of one

 public:
  using V = typename E::V;

  explicit MEMOPT_INLINE KeepScales(const Keeper<A>& keeper) : keeper_(keeper) {}

  // Of the elements index, index + 1, ... of a step, in order.
  MEMOPT_INLINE Step<V> at(uint64_t index) {
    if (index - begin_ > kBlock - E::kStep) make_block(index);
    return E::load(scales_ + (index - begin_));
  }

 private:
  static constexpr int kBlock = 512;

  __attribute__((noinline)) void make_block(uint64_t index) {
    const Keeper<A> keeper = keeper_;
    const uint64_t group = index / kDropoutGroup;
    begin_ = group * kDropoutGroup;
    alignas(64) uint16_t bits[kBlock];
    philox_halves<kBlock / kDropoutGroup>(keeper.key, keeper.step, group, bits);
    for (int i = 0; i < kBlock; ++i) scales_[i] = scale_of(keeper, bits[i]);
  }

  const Keeper<A> keeper_;
  uint64_t begin_ = uint64_t{1} << 63;  // no index is near it: the first step makes a block
  alignas(64) A scales_[kBlock];
};

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
