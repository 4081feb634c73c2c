// Forward of the norms over rows: layer_norm.cpp, layer_norm_gelu.cpp, rms_norm.cpp, add_norm.cpp
// and dropout_add_norm.cpp instantiate it. Formulas: kernels/layer_norm.h, kernels/rms_norm.h;
// parts: kernels/norm.h.
//
// A row is read from memory once and again from the cache: LayerNorm makes the mean, the centred
// moments and the output in three sweeps, RMSNorm the mean square and the output in two.
#pragma once

#include <memory>
#include <type_traits>

#include "../dropout_add_norm.h"
#include "cascade.h"
#include "keep_scales.h"
#include "kernels.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

// gamma or beta of a step; `otherwise` where there is none.
template <class V, class G, class Extent>
MEMOPT_INLINE Step<V> load_parameter(const G* p, int64_t i, Extent extent, float otherwise) {
  if (p == nullptr) return {V(otherwise), V(otherwise)};
  return load(p + i, extent);
}

// The scale of a step, from gamma; `offset` is scale_offset().
template <class Norm, class V, class G, class Extent>
MEMOPT_INLINE Step<V> load_scale(const G* gamma, V offset, int64_t i, Extent extent) {
  using S = typename Norm::Statistics;
  const Step<V> v = load_parameter<V>(gamma, i, extent, 1.0f);
  return {S::scale(v.lo, offset), S::scale(v.hi, offset)};
}

// Asks for the lines of the step that begins `ahead` elements on. That may lie beyond the array: a
// prefetch never faults.
template <class T>
MEMOPT_INLINE void prefetch_step(const T* p, int64_t ahead) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(p) + ahead * sizeof(T);
  constexpr uintptr_t kBytes = Elements<T>::kStep * sizeof(T);
  for (uintptr_t line = 0; line < kBytes; line += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(address + line), 0, 2);
  }
}

// Where a row's first sweep gets a step from: here, from x.
template <class T>
struct PlainRow {
  const T* x;

  template <class Extent>
  MEMOPT_INLINE auto first(int64_t i, Extent extent) const {
    return load(x + i, extent);
  }
  // Where later sweeps find it.
  const T* again() const { return x; }
};

// The rounded sum of two rows, which goes to `sum` on the way.
template <class T>
struct AddedRow {
  const T* x;
  const T* residual;
  T* sum;

  template <class Extent>
  MEMOPT_INLINE auto first(int64_t i, Extent extent) const {
    const auto a = load(x + i, extent);
    const auto b = load(residual + i, extent);
    store(sum + i, Step{a.lo + b.lo, a.hi + b.hi}, extent);
    return load(sum + i, extent);
  }
  const T* again() const { return sum; }
};

// The same with x times its keep scales, not rounded before it is added.
template <class T>
struct DroppedRow {
  const T* x;
  const T* residual;
  T* sum;
  KeepScales<T>* scales;
  uint64_t index;  // of the row's first element

  template <class Extent>
  MEMOPT_INLINE auto first(int64_t i, Extent extent) const {
    using M = Math<typename Elements<T>::V>;
    const auto a = load(x + i, extent);
    const auto b = load(residual + i, extent);
    const auto keep = scales->at(index + static_cast<uint64_t>(i));
    store(sum + i, Step{M::fma(a.lo, keep.lo, b.lo), M::fma(a.hi, keep.hi, b.hi)}, extent);
    return load(sum + i, extent);
  }
  const T* again() const { return sum; }
};

// The keep scales of all rows of a range, of which each begins where the one before ends.
struct NoScales {
  template <class Keeper>
  explicit NoScales(const Keeper&) {}
};
template <class Norm, class T>
using RowScales = std::conditional_t<Norm::kDrops, KeepScales<T>, NoScales>;

template <class T>
AddedRow<T> added_row(const T* x, const T* residual, T* sum, NoScales*, int64_t /*index*/) {
  return {x, residual, sum};
}
template <class T>
DroppedRow<T> added_row(const T* x, const T* residual, T* sum, KeepScales<T>* scales,
                        int64_t index) {
  return {x, residual, sum, scales, static_cast<uint64_t>(index)};
}

// Four accumulators, two steps at a time; a single step left over and the tail go to the first two.
template <class T, class Row>
Accumulate<T> row_sum(const Row& row, int64_t cols) {
  using V = typename Elements<T>::V;
  constexpr int64_t kStep = Elements<T>::kStep;
  Cascade<Accumulate<T>> sum;
  for_blocks<T>(cols, [&](int64_t begin, int64_t end) {
    Step<V> a{V(0), V(0)};
    Step<V> b{V(0), V(0)};
    int64_t i = begin;
    for (; i + 2 * kStep <= end; i += 2 * kStep) {
      const Step<V> p = row.first(i, Whole{});
      const Step<V> q = row.first(i + kStep, Whole{});
      a = {a.lo + p.lo, a.hi + p.hi};
      b = {b.lo + q.lo, b.hi + q.hi};
    }
    for_steps<T>(i, end, [&](int64_t j, auto extent) __attribute__((always_inline)) {
      const Step<V> p = row.first(j, extent);
      a = {a.lo + p.lo, a.hi + p.hi};
    });
    sum.add(sum_lanes((a.lo + a.hi) + (b.lo + b.hi)));
  });
  return sum.total();
}

template <class T, class Row>
Moments<Accumulate<T>> row_statistics(Centred, const Row& row, int64_t cols, double eps) {
  using V = typename Elements<T>::V;
  using M = Math<V>;
  const Accumulate<T> mean = row_sum<T>(row, cols) / static_cast<Accumulate<T>>(cols);
  const T* const x = row.again();
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

// Like row_sum: two steps at a time hide the latency of four chains.
template <class T, class Row>
Moments<Accumulate<T>> row_statistics(RootMeanSquare, const Row& row, int64_t cols, double eps) {
  using V = typename Elements<T>::V;
  using M = Math<V>;
  constexpr int64_t kStep = Elements<T>::kStep;
  Cascade<Accumulate<T>> x2_sum;
  for_blocks<T>(cols, [&](int64_t begin, int64_t end) {
    Step<V> a{V(0), V(0)};
    Step<V> b{V(0), V(0)};
    int64_t i = begin;
    for (; i + 2 * kStep <= end; i += 2 * kStep) {
      const Step<V> p = row.first(i, Whole{});
      const Step<V> q = row.first(i + kStep, Whole{});
      a = {M::fma(p.lo, p.lo, a.lo), M::fma(p.hi, p.hi, a.hi)};
      b = {M::fma(q.lo, q.lo, b.lo), M::fma(q.hi, q.hi, b.hi)};
    }
    for_steps<T>(i, end, [&](int64_t j, auto extent) __attribute__((always_inline)) {
      const Step<V> p = row.first(j, extent);
      a = {M::fma(p.lo, p.lo, a.lo), M::fma(p.hi, p.hi, a.hi)};
    });
    x2_sum.add(sum_lanes((a.lo + a.hi) + (b.lo + b.hi)));
  });
  return {0, RootMeanSquare::rstd(x2_sum.total(), cols, eps)};
}

// What the output sweep of a row with an addend does besides.
template <class T>
struct AddedRowOutput {
  T* sum;             // the row is copied there; null: it is there already
  const T* x;         // the addends, of which the next row is asked for: the hardware's
  const T* residual;  // prefetchers lose two arrays' thread between the sweeps
};

// The output sweep over a row x with known statistics.
template <class Norm, class T, class G>
void write_output(const NormForwardParams& p, const T* x, Moments<Accumulate<T>> stats, T* y,
                  AddedRowOutput<T> added, bool streamed) {
  using S = typename Norm::Statistics;
  using Activation = typename Norm::Activation;
  using V = typename Elements<T>::V;
  const G* const gamma = static_cast<const G*>(p.gamma);
  const G* const beta = Norm::kCentred ? static_cast<const G*>(p.beta) : nullptr;
  const V offset(scale_offset(p));
  const V mean(stats.mean);
  const V rstd(stats.rstd);
  for_steps<T>(0, p.cols, [&](int64_t i, auto extent) __attribute__((always_inline)) {
    const Step<V> v = load(x + i, extent);
    const Step<V> g = load_scale<Norm>(gamma, offset, i, extent);
    const Step<V> b = load_parameter<V>(beta, i, extent, 0.0f);
    const V lo = S::affine(S::normalize(v.lo, mean, rstd), g.lo, b.lo);
    const V hi = S::affine(S::normalize(v.hi, mean, rstd), g.hi, b.hi);
    if constexpr (Norm::kAdds) {
      prefetch_step(added.x + i, p.x_row_stride);
      prefetch_step(added.residual + i, p.residual_row_stride);
      if (added.sum != nullptr) store(added.sum + i, v, extent, streamed);
    }
    store(y + i, Step<V>{Activation::value(lo), Activation::value(hi)}, extent, streamed);
  });
}

template <class Norm, class T, class G>
void forward_rows(const NormForwardParams& p, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  const bool streamed = p.stream_stores && is_aligned(p.y) && (!Norm::kAdds || is_aligned(p.sum)) &&
                        p.cols * static_cast<int64_t>(sizeof(T)) % 64 == 0;
  // Stores past the caches cannot be read again soon: a row of sums waits here for them.
  std::unique_ptr<T[]> waiting;
  if (Norm::kAdds && streamed) waiting.reset(new T[p.cols]);
  [[maybe_unused]] RowScales<Norm, T> scales(make_keeper<A>(p.rule));
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(p.x) + row * p.x_row_stride;
    T* y = static_cast<T*>(p.y) + row * p.cols;
    Moments<A> stats;
    if constexpr (Norm::kAdds) {
      T* const sum = static_cast<T*>(p.sum) + row * p.cols;
      const T* const residual = static_cast<const T*>(p.residual) + row * p.residual_row_stride;
      const auto source =
          added_row(x, residual, streamed ? waiting.get() : sum, &scales, row * p.cols);
      stats = row_statistics<T>(typename Norm::Statistics(), source, p.cols, p.eps);
      write_output<Norm, T, G>(p, source.again(), stats, y, {streamed ? sum : nullptr, x, residual},
                               streamed);
    } else {
      stats = row_statistics<T>(typename Norm::Statistics(), PlainRow<T>{x}, p.cols, p.eps);
      write_output<Norm, T, G>(p, x, stats, y, {}, streamed);
    }
    if (p.rstd != nullptr) {
      if (Norm::kCentred) static_cast<A*>(p.mean)[row] = stats.mean;
      static_cast<A*>(p.rstd)[row] = stats.rstd;
    }
  }
  if (streamed) stream_fence();
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
