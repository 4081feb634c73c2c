// What elements are multiplied by under dropout: for any kernel that walks over neighbouring
// elements, kKeepBlock of them at most at a time.
//
//   KeepScales<T> scales(make_keeper<Accumulate<T>>(p.rule));
//   ... const auto* keep = scales.at(index, count);         of the elements index, index + 1, ...
//   ... const auto k = load_keep<T>(keep + i);              of a step; x.lo * k.lo, x.hi * k.hi
//
// They lie in the first-level cache until they are used. A block begins at any group of 8, so a row
// may begin at any index; short rows share a block.
#pragma once

#include "../dropout.h"
#include "philox.h"
#include "vec.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

constexpr int64_t kKeepBlock = 1024;

template <class T>
class KeepScales {
  using A = Accumulate<T>;

 public:
  explicit MEMOPT_INLINE KeepScales(const Keeper<A>& keeper) : keeper_(keeper) {}

  // Of `count` elements, at most kKeepBlock. A step may be read from its beginning, also where it
  // ends behind them.
  const A* at(uint64_t index, int64_t count) {
    if (index < begin_ || index + static_cast<uint64_t>(count) > end_) make_block(index, count);
    return scales_ + (index - begin_);
  }

 private:
  static constexpr int kCalls = 16;  // at once
  static constexpr int64_t kAtOnce = kCalls * kDropoutGroup;
  static constexpr int64_t kLeast = 512;  // rows shorter than that share a block

  __attribute__((noinline)) void make_block(uint64_t index, int64_t count) {
    const Keeper<A> keeper = keeper_;
    const uint64_t group = index / kDropoutGroup;
    begin_ = group * kDropoutGroup;
    end_ = begin_;
    const uint64_t end = index + static_cast<uint64_t>(count < kLeast ? kLeast : count);
    A* to = scales_;
    for (; end_ < end; end_ += kAtOnce, to += kAtOnce) {
      alignas(64) uint16_t bits[kAtOnce];
      philox_halves<kCalls>(keeper.key, keeper.step, end_ / kDropoutGroup, bits);
      for (int i = 0; i < kAtOnce; ++i) to[i] = scale_of(keeper, bits[i]);
    }
  }

  const Keeper<A> keeper_;
  uint64_t begin_ = 1;  // nothing is between them: the first call makes a block
  uint64_t end_ = 0;
  alignas(64) A scales_[kKeepBlock + 2 * kAtOnce];
};

// The scales of a step.
template <class T>
MEMOPT_INLINE Step<typename Elements<T>::V> load_keep(const Accumulate<T>* keep) {
  return Elements<Accumulate<T>>::load(keep);
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
