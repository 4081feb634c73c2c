// The row kernels of LayerNorm with an activation behind it: layer_norm.cpp instantiates them with Identity,
// layer_norm_gelu.cpp with GeluErf and GeluTanh. Formulas: kernels/layer_norm.h.
//
// Forward reads a row from memory once and twice more from the cache: mean, centred moments, output.
// Backward works on kRowGroup rows at a time and on a row twice: the first sweep makes the two sums that dx needs, adds
// to the part's dgamma and dbeta, which so are loaded and stored once for kRowGroup rows, and re-emits y; the second
// sweep writes dx. dz = dy act'(z) is costly behind an activation and is kept between the sweeps (kRowGroup rows of
// floats, in cache).
#pragma once

#include <memory>

#include "kernels.h"
#include "vec.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

// Row sums of a group stay in registers: 32 of them with AVX-512, 16 otherwise.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kRowGroup = 4;
#else
constexpr int kRowGroup = 2;
#endif

// gamma or beta of a step; `otherwise` where there is none.
template <class V, class G, class Extent>
MEMOPT_INLINE Step<V> load_parameter(const G* p, int64_t i, Extent extent, float otherwise) {
  if (p == nullptr) return {V(otherwise), V(otherwise)};
  return load(p + i, extent);
}

template <class V>
struct RowSum {
  Step<V> a{V(0), V(0)};
  Step<V> b{V(0), V(0)};

  auto total() const { return sum_lanes((a.lo + a.hi) + (b.lo + b.hi)); }
};

// Four accumulators, two steps at a time; a single step left over and the tail go to the first two.
template <class T>
auto row_sum(const T* x, int64_t cols) {
  using V = typename Elements<T>::V;
  constexpr int64_t kStep = Elements<T>::kStep;
  RowSum<V> sum;
  int64_t i = 0;
  for (; i + 2 * kStep <= cols; i += 2 * kStep) {
    const Step<V> p = load(x + i, Whole{});
    const Step<V> q = load(x + i + kStep, Whole{});
    sum.a = {sum.a.lo + p.lo, sum.a.hi + p.hi};
    sum.b = {sum.b.lo + q.lo, sum.b.hi + q.hi};
  }
  for_steps<T>(cols - i, [&](int64_t j, auto extent) {
    const Step<V> p = load(x + i + j, extent);
    sum.a = {sum.a.lo + p.lo, sum.a.hi + p.hi};
  });
  return sum.total();
}

template <class T>
Moments<Accumulate<T>> row_moments(const T* x, int64_t cols, double eps) {
  using V = typename Elements<T>::V;
  using M = Math<V>;
  const Accumulate<T> mean = row_sum(x, cols) / static_cast<Accumulate<T>>(cols);
  const V m(mean);
  Step<V> d_sum{V(0), V(0)};
  Step<V> d2_sum{V(0), V(0)};
  for_steps<T>(cols, [&](int64_t i, auto extent) {
    const Step<V> v = load(x + i, extent);
    const Step<V> d = keep_valid(Step<V>{v.lo - m, v.hi - m}, extent);
    d_sum = {d_sum.lo + d.lo, d_sum.hi + d.hi};
    d2_sum = {M::fma(d.lo, d.lo, d2_sum.lo), M::fma(d.hi, d.hi, d2_sum.hi)};
  });
  return moments(mean, sum_lanes(d_sum.lo + d_sum.hi), sum_lanes(d2_sum.lo + d2_sum.hi), cols, eps);
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
    for_steps<T>(p.cols, [&](int64_t i, auto extent) {
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

// The typed view of LayerNormBackwardParams for one part.
template <class T, class G>
struct BackwardPart {
  using A = Accumulate<T>;
  const LayerNormBackwardParams& p;
  const G* gamma;
  const G* beta;
  A* dgamma;  // the part's sums; null: not wanted
  A* dbeta;
  A* dz;  // [kRowGroup, cols]; null without an activation
  bool streamed;

  const T* x(int64_t row) const { return static_cast<const T*>(p.x) + row * p.x_row_stride; }
  const T* dy(int64_t row) const { return static_cast<const T*>(p.dy) + row * p.dy_row_stride; }
  T* dx(int64_t row) const { return static_cast<T*>(p.dx) + row * p.cols; }
  T* y(int64_t row) const { return static_cast<T*>(p.y) + row * p.cols; }
  A mean(int64_t row) const { return static_cast<const A*>(p.mean)[row]; }
  A rstd(int64_t row) const { return static_cast<const A*>(p.rstd)[row]; }
};

// Rows [row, row + kRows). Each row's arithmetic and its order are the same for every kRows.
template <class Activation, int kRows, class T, class G>
void backward_group(const BackwardPart<T, G>& part, int64_t row) {
  using V = typename Elements<T>::V;
  using A = Accumulate<T>;
  using M = Math<V>;
  constexpr bool kActivation = Activation::kNeedsPreactivation;
  const LayerNormBackwardParams& p = part.p;
  const int64_t cols = p.cols;

  Step<V> g_sum[kRows];
  Step<V> gx_sum[kRows];
  for (int r = 0; r < kRows; ++r) g_sum[r] = gx_sum[r] = {V(0), V(0)};

  for_steps<T>(cols, [&](int64_t i, auto extent) {
    const Step<V> gamma = load_parameter<V>(part.gamma, i, extent, 1.0f);
    Step<V> beta{V(0), V(0)};
    if (kActivation || p.y != nullptr) beta = load_parameter<V>(part.beta, i, extent, 0.0f);
    Step<V> dgamma{V(0), V(0)};
    Step<V> dbeta{V(0), V(0)};
    if (part.dgamma != nullptr) {
      dgamma = load(part.dgamma + i, extent);
      dbeta = load(part.dbeta + i, extent);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const V mean(part.mean(row + r));
      const V rstd(part.rstd(row + r));
      const Step<V> v = load(part.x(row + r) + i, extent);
      Step<V> dz = load(part.dy(row + r) + i, extent);
      const Step<V> xhat{normalize(v.lo, mean, rstd), normalize(v.hi, mean, rstd)};
      if (kActivation || p.y != nullptr) {
        const auto lo = Activation::value_and_grad(scale_shift(xhat.lo, gamma.lo, beta.lo));
        const auto hi = Activation::value_and_grad(scale_shift(xhat.hi, gamma.hi, beta.hi));
        if (p.y != nullptr) store(part.y(row + r) + i, Step<V>{lo.value, hi.value}, extent, part.streamed);
        if constexpr (kActivation) {
          dz = {dz.lo * lo.grad, dz.hi * hi.grad};
          store(part.dz + r * cols + i, dz, extent);
        }
      }
      dgamma = {M::fma(dz.lo, xhat.lo, dgamma.lo), M::fma(dz.hi, xhat.hi, dgamma.hi)};
      dbeta = {dbeta.lo + dz.lo, dbeta.hi + dz.hi};
      const Step<V> g{dz.lo * gamma.lo, dz.hi * gamma.hi};
      g_sum[r] = {g_sum[r].lo + g.lo, g_sum[r].hi + g.hi};
      gx_sum[r] = {M::fma(g.lo, xhat.lo, gx_sum[r].lo), M::fma(g.hi, xhat.hi, gx_sum[r].hi)};
    }
    if (part.dgamma != nullptr) {
      store(part.dgamma + i, dgamma, extent);
      store(part.dbeta + i, dbeta, extent);
    }
  });
  if (p.dx == nullptr) return;

  for (int r = 0; r < kRows; ++r) {
    const A n = static_cast<A>(cols);
    const V mean_g(sum_lanes(g_sum[r].lo + g_sum[r].hi) / n);
    const V mean_gx(sum_lanes(gx_sum[r].lo + gx_sum[r].hi) / n);
    const V mean(part.mean(row + r));
    const V rstd(part.rstd(row + r));
    const T* x = part.x(row + r);
    const T* dy = part.dy(row + r);
    T* dx = part.dx(row + r);
    for_steps<T>(cols, [&](int64_t i, auto extent) {
      const Step<V> gamma = load_parameter<V>(part.gamma, i, extent, 1.0f);
      const Step<V> v = load(x + i, extent);
      Step<V> dz;
      if constexpr (kActivation) {
        dz = load(part.dz + r * cols + i, extent);
      } else {
        dz = load(dy + i, extent);
      }
      const V lo = input_grad(dz.lo * gamma.lo, normalize(v.lo, mean, rstd), mean_g, mean_gx, rstd);
      const V hi = input_grad(dz.hi * gamma.hi, normalize(v.hi, mean, rstd), mean_g, mean_gx, rstd);
      store(dx + i, Step<V>{lo, hi}, extent, part.streamed);
    });
  }
}

template <class Activation, class T, class G>
void backward_parts(const LayerNormBackwardParams& p, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  const int64_t rows_per_part = layer_norm_rows_per_part(p.rows);
  std::unique_ptr<A[]> dz;
  if (Activation::kNeedsPreactivation) dz.reset(new A[kRowGroup * p.cols]);
  const bool streamed = p.stream_stores && p.cols * static_cast<int64_t>(sizeof(T)) % 64 == 0 &&
                        is_aligned(p.dx) && is_aligned(p.y);
  for (int64_t i = begin; i < end; ++i) {
    A* sums = p.partials ? static_cast<A*>(p.partials) + i * 2 * p.cols : nullptr;
    if (sums != nullptr) std::memset(sums, 0, 2 * p.cols * sizeof(A));
    const BackwardPart<T, G> part{
        p,        static_cast<const G*>(p.gamma),  static_cast<const G*>(p.beta), sums, sums ? sums + p.cols : nullptr,
        dz.get(), streamed};
    const int64_t last = (i + 1) * rows_per_part < p.rows ? (i + 1) * rows_per_part : p.rows;
    int64_t row = i * rows_per_part;
    for (; row + kRowGroup <= last; row += kRowGroup) backward_group<Activation, kRowGroup>(part, row);
    for (; row < last; ++row) backward_group<Activation, 1>(part, row);
  }
  if (streamed) stream_fence();
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
