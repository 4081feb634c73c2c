// Forward of the norms over rows. Formulas: kernels/norm.h.
//
// A row is read from memory once and again from the cache: LayerNorm makes the mean, the centred
// moments and the output in three sweeps, RMSNorm the mean square and the output in two. A
// residual, and dropout, belong to the first sweep, whose row is then the sum.
#include "../norm.h"

#include <memory>
#include <optional>

#include "keep_scales.h"
#include "kernels.h"
#include "norm_parameters.h"
#include "rounded_to.h"
#include "row_sums.h"
#include "table.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {
namespace {

// The rounded sum of x, or of what dropout leaves of it, and residual, which goes to `sum` on the
// way.
template <class T>
struct AddedRow {
  const T* x;
  const T* residual;
  T* sum;
  KeepScales<T>* scales;  // null: nothing is dropped
  int64_t index;          // of the row's first element, for `scales`
  const Accumulate<T>* keep = nullptr;

  MEMOPT_INLINE void start_block(int64_t begin, int64_t end) {
    static_assert(kSumBlock<T> <= kKeepBlock);
    if (scales == nullptr) return;
    keep = scales->at(static_cast<uint64_t>(index + begin), end - begin) - begin;
  }
  template <class Extent>
  MEMOPT_INLINE auto first(int64_t i, Extent extent) const {
    using V = typename Elements<T>::V;
    const Step<V> a = load(x + i, extent);
    const Step<V> b = load(residual + i, extent);
    Step<V> v;
    if (keep == nullptr) {
      v = {a.lo + b.lo, a.hi + b.hi};
    } else {
      const Step<V> k = load_keep<T>(keep + i);
      v = {Math<V>::fma(a.lo, k.lo, b.lo), Math<V>::fma(a.hi, k.hi, b.hi)};
    }
    store(sum + i, v, extent);
    return load(sum + i, extent);
  }
  const T* again() const { return sum; }
};

// Of the row behind the first sweep, centred around its rounded mean.
template <class T>
Moments<Accumulate<T>> centred_moments(const T* x, Accumulate<T> mean, int64_t cols, double eps) {
  const auto [d, d2] = centred_sums(x, mean, cols);
  return moments(mean, d, d2, cols, eps);
}

template <class T, class Row>
__attribute__((noinline)) Moments<Accumulate<T>> row_statistics(NormKind kind, Row& row,
                                                                int64_t cols, double eps) {
  using V = typename Elements<T>::V;
  if (kind == NormKind::kLayerNorm) {
    const auto n = static_cast<Accumulate<T>>(cols);
    return centred_moments(row.again(), sum_first_sweep<T>(row, cols, AddStep()) / n, cols, eps);
  }
  const auto add_square = [](Step<V> v, Step<V> sum) __attribute__((always_inline)) {
    return Step<V>{Math<V>::fma(v.lo, v.lo, sum.lo), Math<V>::fma(v.hi, v.hi, sum.hi)};
  };
  return {0, RootMeanSquare::rstd(sum_first_sweep<T>(row, cols, add_square), cols, eps)};
}

// What the output sweep does besides.
template <class T>
struct BesideOutput {
  T* sum;             // a row of sums is copied there; null: it is there already
  const T* x;         // what the first sweep reads, of which the next row is asked for: the
  const T* residual;  // hardware's prefetchers lose its thread between the sweeps
};

// gamma and beta of a range.
template <class A>
struct Affine {
  const A* gamma;
  const A* beta;
};

// The output sweep over a row x with known statistics. kAdds is known to the compiler: asked in the
// loop, it took a quarter more of the time where results are stored past the caches.
template <class Norm, bool kAdds, class T>
void write_output(const NormForwardParams& p, Affine<Accumulate<T>> affine, const T* x,
                  Moments<Accumulate<T>> stats, T* y, BesideOutput<T> beside, bool streamed) {
  using S = typename Norm::Statistics;
  using V = typename Elements<T>::V;
  const auto f = rounded_to<T>(make_activation<typename Norm::Activation>(p.activation));
  const auto [gamma, beta] = affine;
  const V offset(scale_offset(p));
  const V mean(stats.mean);
  const V rstd(stats.rstd);
  // Of a plain row, where memory is what it waits for: the sweeps before this one ask it for
  // nothing. Of rows of less than a page the hardware has the next one in sight.
  const bool far = streamed && p.cols * static_cast<int64_t>(sizeof(T)) >= 4096;
  const int64_t x_ahead = kAdds || far ? p.x_row_stride : 0;
  const int64_t residual_ahead = p.residual_row_stride;
  for_steps<T>(0, p.cols,
               [=, gamma = gamma, beta = beta](int64_t i, auto extent)
                   __attribute__((always_inline)) {
                     const Step<V> v = load(x + i, extent);
                     const Step<V> g = load_scale<Norm>(gamma, offset, i, extent);
                     const Step<V> b = load_parameter<V>(beta, i, extent, 0.0f);
                     const V lo = S::affine(S::normalize(v.lo, mean, rstd), g.lo, b.lo);
                     const V hi = S::affine(S::normalize(v.hi, mean, rstd), g.hi, b.hi);
                     prefetch_step(beside.x + i, x_ahead);
                     if constexpr (kAdds) {
                       prefetch_step(beside.residual + i, residual_ahead);
                       if (beside.sum != nullptr) store(beside.sum + i, v, extent, streamed);
                     }
                     store(y + i, Step<V>{f.value(lo), f.value(hi)}, extent, streamed);
                   });
}

template <class Norm, class T>
void forward_rows(const NormForwardParams& p, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  const bool adds = p.residual != nullptr;
  const bool streamed = p.stream_stores && is_aligned(p.y) && (!adds || is_aligned(p.sum)) &&
                        p.cols * static_cast<int64_t>(sizeof(T)) % 64 == 0;
  const Parameter<A> gamma(p.gamma, p.param_dtype, p.cols);
  const Parameter<A> beta(Norm::kCentred ? p.beta : nullptr, p.param_dtype, p.cols);
  const Affine<A> affine{gamma.data(), beta.data()};
  // Stores past the caches cannot be read again soon: a row of sums waits here for them.
  std::unique_ptr<T[]> waiting;
  if (adds && streamed) waiting.reset(new T[p.cols]);
  std::optional<KeepScales<T>> scales;
  if (p.drops) scales.emplace(make_keeper<A>(p.rule));
  for (int64_t i = begin; i < end; ++i) {
    const T* x = static_cast<const T*>(p.x) + i * p.x_row_stride;
    T* y = static_cast<T*>(p.y) + i * p.cols;
    Moments<A> stats;
    if (adds) {
      T* const sum = static_cast<T*>(p.sum) + i * p.cols;
      const T* const residual = static_cast<const T*>(p.residual) + i * p.residual_row_stride;
      AddedRow<T> row{x, residual, streamed ? waiting.get() : sum, scales ? &*scales : nullptr,
                      i * p.cols};
      stats = row_statistics<T>(p.kind, row, p.cols, p.eps);
      write_output<Norm, true, T>(p, affine, row.again(), stats, y,
                                  {streamed ? sum : nullptr, x, residual}, streamed);
    } else {
      PlainRow<T> row{x};
      stats = row_statistics<T>(p.kind, row, p.cols, p.eps);
      write_output<Norm, false, T>(p, affine, x, stats, y, {nullptr, x, nullptr}, streamed);
    }
    if (p.rstd != nullptr) {
      if (Norm::kCentred) static_cast<A*>(p.mean)[i] = stats.mean;
      static_cast<A*>(p.rstd)[i] = stats.rstd;
    }
  }
  if (streamed) stream_fence();
}

}  // namespace

void norm_forward(const NormForwardParams& p, int64_t begin, int64_t end) {
  with_type(p.dtype, [&](auto t) {
    with_norm(p, [&](auto norm) { forward_rows<decltype(norm), decltype(t)>(p, begin, end); });
  });
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
