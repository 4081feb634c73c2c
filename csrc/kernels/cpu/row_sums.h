// The sums over a row of neighbouring elements that moments are made of.
#pragma once

#include "cascade.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

// Where a row's first sweep gets a step from: here, from x.
template <class T>
struct PlainRow {
  const T* x;

  MEMOPT_INLINE void start_block(int64_t, int64_t) const {}
  template <class Extent>
  MEMOPT_INLINE auto first(int64_t i, Extent extent) const {
    return load(x + i, extent);
  }
  // Where later sweeps find it.
  const T* again() const { return x; }
};

struct AddStep {
  template <class V>
  MEMOPT_INLINE Step<V> operator()(Step<V> v, Step<V> sum) const {
    return {sum.lo + v.lo, sum.hi + v.hi};
  }
};

// Four accumulators, two steps at a time; a single step left over and the tail go to the first two.
// add(step, accumulators) adds a step.
template <class T, class Row, class Add>
MEMOPT_INLINE Accumulate<T> sum_first_sweep(Row& row, int64_t cols, Add add) {
  using V = typename Elements<T>::V;
  constexpr int64_t kStep = Elements<T>::kStep;
  return sum_blocks<T>(cols, [&](int64_t begin, int64_t end) {
    row.start_block(begin, end);
    const Row here = row;  // in registers: for all the compiler knows, a store changes `row`
    Step<V> a{V(0), V(0)};
    Step<V> b{V(0), V(0)};
    int64_t i = begin;
    for (; i + 2 * kStep <= end; i += 2 * kStep) {
      const Step<V> p = here.first(i, Whole{});
      const Step<V> q = here.first(i + kStep, Whole{});
      a = add(p, a);
      b = add(q, b);
    }
    for_steps<T>(i, end, [&](int64_t j, auto extent) __attribute__((always_inline)) {
      a = add(here.first(j, extent), a);
    });
    return sum_lanes((a.lo + a.hi) + (b.lo + b.hi));
  });
}

// Of d = x - mean and of d^2, over n elements.
template <class T>
TwoSums<Accumulate<T>> centred_sums(const T* x, Accumulate<T> mean, int64_t n) {
  using V = typename Elements<T>::V;
  using M = Math<V>;
  const V m(mean);
  return sum_blocks<T>(n, [&](int64_t begin, int64_t end) {
    Step<V> sum{V(0), V(0)};
    Step<V> squares{V(0), V(0)};
    for_steps<T>(begin, end, [&](int64_t i, auto extent) __attribute__((always_inline)) {
      const Step<V> v = load(x + i, extent);
      const Step<V> d = keep_valid(Step<V>{v.lo - m, v.hi - m}, extent);
      sum = {sum.lo + d.lo, sum.hi + d.hi};
      squares = {M::fma(d.lo, d.lo, squares.lo), M::fma(d.hi, d.hi, squares.hi)};
    });
    return sum_lanes(sum.lo + sum.hi, squares.lo + squares.hi);
  });
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
