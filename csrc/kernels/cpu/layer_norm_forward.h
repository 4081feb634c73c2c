// LayerNorm forward with an activation behind it: layer_norm.cpp instantiates it with Identity,
// layer_norm_gelu.cpp with GeluErf and GeluTanh. Formulas: kernels/layer_norm.h.
//
// A row is read from memory once and twice more from the cache: mean, centred moments, output.
#pragma once

#include "cascade.h"
#include "kernels.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

// gamma or beta of a step; `otherwise` where there is none.
template <class V, class G, class Extent>
MEMOPT_INLINE Step<V> load_parameter(const G* p, int64_t i, Extent extent, float otherwise) {
  if (p == nullptr) return {V(otherwise), V(otherwise)};
  return load(p + i, extent);
}

// Four accumulators, two steps at a time; a single step left over and the tail go to the first two.
template <class T>
Accumulate<T> row_sum(const T* x, int64_t cols) {
  using V = typename Elements<T>::V;
  constexpr int64_t kStep = Elements<T>::kStep;
  Cascade<Accumulate<T>> sum;
  for_blocks<T>(cols, [&](int64_t begin, int64_t end) {
    Step<V> a{V(0), V(0)};
    Step<V> b{V(0), V(0)};
    int64_t i = begin;
    for (; i + 2 * kStep <= end; i += 2 * kStep) {
      const Step<V> p = load(x + i, Whole{});
      const Step<V> q = load(x + i + kStep, Whole{});
      a = {a.lo + p.lo, a.hi + p.hi};
      b = {b.lo + q.lo, b.hi + q.hi};
    }
    for_steps<T>(i, end, [&](int64_t j, auto extent) __attribute__((always_inline)) {
      const Step<V> p = load(x + j, extent);
      a = {a.lo + p.lo, a.hi + p.hi};
    });
    sum.add(sum_lanes((a.lo + a.hi) + (b.lo + b.hi)));
  });
  return sum.total();
}

template <class T>
Moments<Accumulate<T>> row_moments(const T* x, int64_t cols, double eps) {
  using V = typename Elements<T>::V;
  using M = Math<V>;
  const Accumulate<T> mean = row_sum(x, cols) / static_cast<Accumulate<T>>(cols);
  const V m(mean);
  Cascade<Accumulate<T>> d_sum;
  Cascade<Accumulate<T>> d2_sum;
  for_blocks<T>(cols, [&](int64_t begin, int64_t end) {
    Step<V> sum{V(0), V(0)};
    Step<V> squares{V(0), V(0)};
    for_steps<T>(begin, end, [&](int64_t i, auto extent) __attribute__((always_inline)) {
      const Step<V> v = load(x + i, extent);
      const Step<V> d = keep_valid(Step<V>{v.lo - m, v.hi - m}, extent);
      sum = {sum.lo + d.lo, sum.hi + d.hi};
      squares = {M::fma(d.lo, d.lo, squares.lo), M::fma(d.hi, d.hi, squares.hi)};
    });
    d_sum.add(sum_lanes(sum.lo + sum.hi));
    d2_sum.add(sum_lanes(squares.lo + squares.hi));
  });
  return moments(mean, d_sum.total(), d2_sum.total(), cols, eps);
}

template <class Activation, class T, class G>
void forward_rows(const LayerNormForwardParams& p, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  using V = typename Elements<T>::V;
  const G* gamma = static_cast<const G*>(p.gamma);
  const G* beta = static_cast<const G*>(p.beta);
  const bool streamed =
      p.stream_stores && is_aligned(p.y) && p.cols * static_cast<int64_t>(sizeof(T)) % 64 == 0;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(p.x) + row * p.x_row_stride;
    T* y = static_cast<T*>(p.y) + row * p.cols;
    const Moments<A> stats = row_moments(x, p.cols, p.eps);
    const V mean(stats.mean);
    const V rstd(stats.rstd);
    for_steps<T>(0, p.cols, [&](int64_t i, auto extent) __attribute__((always_inline)) {
      const Step<V> v = load(x + i, extent);
      const Step<V> g = load_parameter<V>(gamma, i, extent, 1.0f);
      const Step<V> b = load_parameter<V>(beta, i, extent, 0.0f);
      const V lo = scale_shift(normalize(v.lo, mean, rstd), g.lo, b.lo);
      const V hi = scale_shift(normalize(v.hi, mean, rstd), g.hi, b.hi);
      store(y + i, Step<V>{Activation::value(lo), Activation::value(hi)}, extent, streamed);
    });
    if (p.mean != nullptr) {
      static_cast<A*>(p.mean)[row] = stats.mean;
      static_cast<A*>(p.rstd)[row] = stats.rstd;
    }
  }
  if (streamed) stream_fence();
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
