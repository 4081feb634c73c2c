// Backward of the norms: layer_norm.cpp, layer_norm_gelu.cpp, rms_norm.cpp, add_norm.cpp and
// dropout_add_norm.cpp instantiate it. Formulas: kernels/layer_norm.h, kernels/rms_norm.h; parts:
// kernels/norm.h.
//
// A row is read twice: the first sweep makes the two sums that dx needs, adds to the part's dgamma
// and dbeta, and re-emits y; the second writes dx and asks for the next rows, since the hardware's
// prefetchers lose the thread between sweeps. While a row and the sums stay in the first-level
// cache, rows are taken one at a time; longer ones kRowGroup at a time, which so load and store
// dgamma and dbeta once. dz = dy act'(z) is costly behind an activation and is kept between the
// sweeps (a row of floats each, in cache).
#pragma once

#include <cstring>
#include <memory>

#include "norm_forward.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

// Row sums of a group stay in registers: 32 of them with AVX-512, 16 otherwise.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kRowGroup = 4;
#else
constexpr int kRowGroup = 2;
#endif

// The typed view of NormBackwardParams for one part.
template <class T, class G>
struct BackwardPart {
  using A = Accumulate<T>;
  const NormBackwardParams& p;
  const G* gamma;
  const G* beta;
  A* dgamma;  // the part's sums; null: not wanted
  A* dbeta;   // likewise; null for RMSNorm
  A* dz;      // [kRowGroup, cols]; null without an activation
  bool streamed;
};

// What the sweeps need of one row. They copy what their loops read to local variables: read
// through a reference, it would be read again after every store through an element pointer.
template <class T>
struct BackwardRow {
  using A = Accumulate<T>;
  const T* x;
  const T* dy;
  T* dx;
  const T* dsum;  // null without a sum's gradient
  T* dx_dropped;  // kDrops; null: not wanted
  T* y;           // null: not wanted
  A* dz;
  A mean;
  A rstd;
  Cascade<A> g_sum;
  Cascade<A> gx_sum;
};

// In place, since the cascades are too large to be copied for every row.
template <class T, class G>
void start_row(const BackwardPart<T, G>& part, int64_t index, int64_t place_in_group,
               BackwardRow<T>* row) {
  using A = Accumulate<T>;
  const NormBackwardParams& p = part.p;
  row->x = static_cast<const T*>(p.x) + index * p.x_row_stride;
  row->dy = static_cast<const T*>(p.dy) + index * p.dy_row_stride;
  row->dsum =
      p.dsum == nullptr ? nullptr : static_cast<const T*>(p.dsum) + index * p.dsum_row_stride;
  row->dx = p.dx == nullptr ? nullptr : static_cast<T*>(p.dx) + index * p.cols;
  row->dx_dropped =
      p.dx_dropped == nullptr ? nullptr : static_cast<T*>(p.dx_dropped) + index * p.cols;
  row->y = p.y == nullptr ? nullptr : static_cast<T*>(p.y) + index * p.cols;
  row->dz = part.dz + place_in_group * p.cols;
  row->mean = p.mean == nullptr ? 0 : static_cast<const A*>(p.mean)[index];
  row->rstd = static_cast<const A*>(p.rstd)[index];
}

// The first sweep over the elements [begin, end) of a group of rows.
template <class Norm, int kRows, class T, class G>
void first_sweep(const BackwardPart<T, G>& part, BackwardRow<T> (&rows)[kRows], int64_t begin,
                 int64_t end) {
  using V = typename Elements<T>::V;
  using M = Math<V>;
  using S = typename Norm::Statistics;
  using Activation = typename Norm::Activation;
  constexpr bool kActivation = Activation::kNeedsPreactivation;
  const G* const gammas = part.gamma;
  const G* const betas = part.beta;
  auto* const dgammas = part.dgamma;
  auto* const dbetas = part.dbeta;
  const bool streamed = part.streamed;
  const V offset(scale_offset(part.p));
  const bool emits = rows[0].y != nullptr;
  const T* x_row[kRows];
  const T* dy_row[kRows];
  V mean[kRows];
  V rstd[kRows];
  Step<V> g_sum[kRows];
  Step<V> gx_sum[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    x_row[r] = rows[r].x;
    dy_row[r] = rows[r].dy;
    mean[r] = V(rows[r].mean);
    rstd[r] = V(rows[r].rstd);
    g_sum[r] = gx_sum[r] = {V(0), V(0)};
  }

  for_steps<T>(begin, end, [&](int64_t i, auto extent) __attribute__((always_inline)) {
    const Step<V> gamma = load_scale<Norm>(gammas, offset, i, extent);
    Step<V> beta{V(0), V(0)};
    if (kActivation || emits) beta = load_parameter<V>(betas, i, extent, 0.0f);
    Step<V> dgamma{V(0), V(0)};
    Step<V> dbeta{V(0), V(0)};
    if (dgammas != nullptr) {
      dgamma = load(dgammas + i, extent);
      if (Norm::kCentred) dbeta = load(dbetas + i, extent);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Step<V> v = load(x_row[r] + i, extent);
      Step<V> dz = load(dy_row[r] + i, extent);
      const Step<V> xhat{S::normalize(v.lo, mean[r], rstd[r]),
                         S::normalize(v.hi, mean[r], rstd[r])};
      if (kActivation || emits) {
        const auto lo = Activation::value_and_grad(S::affine(xhat.lo, gamma.lo, beta.lo));
        const auto hi = Activation::value_and_grad(S::affine(xhat.hi, gamma.hi, beta.hi));
        if (emits) store(rows[r].y + i, Step<V>{lo.value, hi.value}, extent, streamed);
        if constexpr (kActivation) {
          dz = {dz.lo * lo.grad, dz.hi * hi.grad};
          store(rows[r].dz + i, dz, extent);
        }
      }
      dgamma = {M::fma(dz.lo, xhat.lo, dgamma.lo), M::fma(dz.hi, xhat.hi, dgamma.hi)};
      if (Norm::kCentred) dbeta = {dbeta.lo + dz.lo, dbeta.hi + dz.hi};
      const Step<V> g{dz.lo * gamma.lo, dz.hi * gamma.hi};
      if (Norm::kCentred) g_sum[r] = {g_sum[r].lo + g.lo, g_sum[r].hi + g.hi};
      gx_sum[r] = {M::fma(g.lo, xhat.lo, gx_sum[r].lo), M::fma(g.hi, xhat.hi, gx_sum[r].hi)};
    }
    if (dgammas != nullptr) {
      store(dgammas + i, dgamma, extent);
      if (Norm::kCentred) store(dbetas + i, dbeta, extent);
    }
  });
  for (int r = 0; r < kRows; ++r) {
    if (Norm::kCentred) rows[r].g_sum.add(sum_lanes(g_sum[r].lo + g_sum[r].hi));
    rows[r].gx_sum.add(sum_lanes(gx_sum[r].lo + gx_sum[r].hi));
  }
}

// The second sweep over one row; the next rows to come lie `group` rows on. index: of the row's
// first element, for `scales`.
template <class Norm, class T, class G>
void second_sweep(const BackwardPart<T, G>& part, const BackwardRow<T>& row, int64_t group,
                  [[maybe_unused]] RowScales<Norm, T>* scales, [[maybe_unused]] int64_t index) {
  using V = typename Elements<T>::V;
  using S = typename Norm::Statistics;
  const NormBackwardParams& p = part.p;
  const auto n = static_cast<Accumulate<T>>(p.cols);
  const V mean_g(row.g_sum.total() / n);
  const V mean_gx(row.gx_sum.total() / n);
  const V mean(row.mean);
  const V rstd(row.rstd);
  const T* const x = row.x;
  const T* const dy = row.dy;
  const T* const dsum = row.dsum;
  const Accumulate<T>* const dzs = row.dz;
  T* const dx = row.dx;
  [[maybe_unused]] T* const dx_dropped = row.dx_dropped;
  const G* const gammas = part.gamma;
  const V offset(scale_offset(p));
  const bool streamed = part.streamed;
  const int64_t x_ahead = group * p.x_row_stride;
  const int64_t dy_ahead = group * p.dy_row_stride;
  const int64_t dsum_ahead = group * p.dsum_row_stride;
  for_steps<T>(0, p.cols, [&](int64_t i, auto extent) __attribute__((always_inline)) {
    const Step<V> gamma = load_scale<Norm>(gammas, offset, i, extent);
    const Step<V> v = load(x + i, extent);
    Step<V> dz;
    if constexpr (Norm::Activation::kNeedsPreactivation) {
      dz = load(dzs + i, extent);
    } else {
      dz = load(dy + i, extent);
    }
    V lo = S::input_grad(dz.lo * gamma.lo, S::normalize(v.lo, mean, rstd), mean_g, mean_gx, rstd);
    V hi = S::input_grad(dz.hi * gamma.hi, S::normalize(v.hi, mean, rstd), mean_g, mean_gx, rstd);
    if (Norm::kAdds && (!Norm::kDrops || dsum != nullptr)) {
      const Step<V> own = load(dsum + i, extent);
      lo = lo + own.lo;
      hi = hi + own.hi;
      prefetch_step(dsum + i, dsum_ahead);
    }
    prefetch_step(x + i, x_ahead);
    prefetch_step(dy + i, dy_ahead);
    if (!Norm::kDrops || dx != nullptr) store(dx + i, Step<V>{lo, hi}, extent, streamed);
    if constexpr (Norm::kDrops) {
      if (dx_dropped == nullptr) return;
      const Step<V> keep = scales->at(static_cast<uint64_t>(index + i));
      store(dx_dropped + i, Step<V>{lo * keep.lo, hi * keep.hi}, extent, streamed);
    }
  });
}

// Rows [first, first + kRows). Each row's arithmetic and its order are the same for every kRows.
template <class Norm, int kRows, class T, class G>
void backward_group(const BackwardPart<T, G>& part, int64_t first, RowScales<Norm, T>* scales) {
  BackwardRow<T> rows[kRows];
  for (int r = 0; r < kRows; ++r) start_row(part, first + r, r, &rows[r]);
  for_blocks<T>(part.p.cols, [&](int64_t begin, int64_t end) {
    first_sweep<Norm, kRows>(part, rows, begin, end);
  });
  if (part.p.dx == nullptr && (!Norm::kDrops || part.p.dx_dropped == nullptr)) return;
  for (int r = 0; r < kRows; ++r)
    second_sweep<Norm>(part, rows[r], kRows, scales, (first + r) * part.p.cols);
}

// Whether one row's x, dy, gamma, dgamma and dbeta stay in the first-level cache (32 KiB nearly
// everywhere) between the sweeps. Then a row at a time is best; else a group of rows shares the
// loads and stores of dgamma and dbeta.
template <class T, class G>
bool fits_first_cache(int64_t cols) {
  return cols * static_cast<int64_t>(2 * sizeof(T) + sizeof(G) + 2 * sizeof(Accumulate<T>)) <=
         32 << 10;
}

template <class Norm, class T, class G>
void backward_parts(const NormBackwardParams& p, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  constexpr int64_t kSums = Norm::kWeightGrads;
  const int64_t rows_per_part = layer_norm_rows_per_part(p.rows);
  std::unique_ptr<A[]> dz;
  if (Norm::Activation::kNeedsPreactivation) dz.reset(new A[kRowGroup * p.cols]);
  const bool streamed = p.stream_stores && p.cols * static_cast<int64_t>(sizeof(T)) % 64 == 0 &&
                        is_aligned(p.dx) && is_aligned(p.y) && is_aligned(p.dx_dropped);
  const bool one_row = fits_first_cache<T, G>(p.cols);
  RowScales<Norm, T> scales(make_keeper<A>(p.rule));
  for (int64_t i = begin; i < end; ++i) {
    A* sums = p.partials ? static_cast<A*>(p.partials) + i * kSums * p.cols : nullptr;
    if (sums != nullptr) std::memset(sums, 0, kSums * p.cols * sizeof(A));
    const BackwardPart<T, G> part{p,
                                  static_cast<const G*>(p.gamma),
                                  Norm::kCentred ? static_cast<const G*>(p.beta) : nullptr,
                                  sums,
                                  Norm::kCentred && sums ? sums + p.cols : nullptr,
                                  dz.get(),
                                  streamed};
    const int64_t last = (i + 1) * rows_per_part < p.rows ? (i + 1) * rows_per_part : p.rows;
    int64_t row = i * rows_per_part;
    for (; !one_row && row + kRowGroup <= last; row += kRowGroup)
      backward_group<Norm, kRowGroup>(part, row, &scales);
    for (; row < last; ++row) backward_group<Norm, 1>(part, row, &scales);
  }
  if (streamed) stream_fence();
}

// The second step of one weight gradient, for the columns [begin, end): `offset` is 0 for dgamma
// and cols for dbeta.
template <class Norm, class A, class G>
void reduce_parts(const NormBackwardParams& p, int64_t offset, void* out, int64_t begin,
                  int64_t end) {
  if (out == nullptr) return;
  using V = typename Elements<G>::V;
  const A* partials = static_cast<const A*>(p.partials) + offset + begin;
  for_steps<G>(0, end - begin, [&](int64_t i, auto extent) __attribute__((always_inline)) {
    Step<V> sum{V(0), V(0)};
    for (int64_t part = 0; part < p.parts; ++part) {
      const Step<V> v = load(partials + part * Norm::kWeightGrads * p.cols + i, extent);
      sum = {sum.lo + v.lo, sum.hi + v.hi};
    }
    store(static_cast<G*>(out) + begin + i, sum, extent);
  });
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
