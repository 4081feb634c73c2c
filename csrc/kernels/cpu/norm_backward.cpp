// Backward of the norms over parts of the rows. Formulas and parts: kernels/norm.h.
//
// A row is read twice: the first sweep makes the two sums that dx needs, adds to the part's dgamma
// and dbeta, and re-emits y; the second writes dx and asks for the next rows, since the hardware's
// prefetchers lose the thread between sweeps. While a row and the sums stay in the first-level
// cache, rows are taken one at a time; longer ones kRowGroup at a time, which so load and store
// dgamma and dbeta once. dz = dy act'(z) is costly behind an activation and is kept between the
// sweeps (a row of floats, in cache).
//
// dgamma and dbeta are sums over rows: of kChunkRows of them in order, and then pairwise, over the
// chunks of a part and over the parts, so that rounding grows with the logarithm of the rows.
#include "../norm.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <optional>

#include "cascade.h"
#include "keep_scales.h"
#include "kernels.h"
#include "norm_parameters.h"
#include "rounded_to.h"
#include "table.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {
namespace {

// Row sums of a group stay in registers: 32 of them with AVX-512, 16 otherwise. Through an
// activation one row at a time is as good: the activation takes longer than the loads and stores of
// dgamma.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kRowGroupSize = 4;
#else
constexpr int kRowGroupSize = 2;
#endif
template <class Norm>
constexpr int kRowGroup = Norm::kActivates ? 1 : kRowGroupSize;

constexpr int64_t kChunkRows = 32;  // a multiple of every group

// What the rows of a part have in common.
template <class T>
struct BackwardPart {
  using A = Accumulate<T>;
  const NormBackwardParams& p;
  const A* gamma;
  const A* beta;
  A* dgamma;  // the chunk's sums; null: not wanted
  A* dbeta;   // likewise; null for RMSNorm
  A* dz;      // [cols]; null without an activation
  bool streamed;
};

// What the sweeps need of one row. They copy what their loops read to local variables: read
// through a reference, it would be read again after every store through an element pointer.
template <class T>
struct BackwardRow {
  using A = Accumulate<T>;
  const T* x;
  const T* dy;
  T* dx;          // null: not wanted
  const T* dsum;  // null without a sum's gradient
  T* dx_dropped;  // null: not wanted
  T* y;           // null: not wanted
  A mean;
  A rstd;
  Cascade<A> g_sum;
  Cascade<A> gx_sum;
};

// In place, since the cascades are too large to be copied for every row.
template <class T>
void start_row(const NormBackwardParams& p, int64_t index, BackwardRow<T>* row) {
  using A = Accumulate<T>;
  const auto read = [&](const void* from, int64_t stride) {
    return from == nullptr ? nullptr : static_cast<const T*>(from) + index * stride;
  };
  const auto write = [&](void* to) {
    return to == nullptr ? nullptr : static_cast<T*>(to) + index * p.cols;
  };
  row->x = read(p.x, p.x_row_stride);
  row->dy = read(p.dy, p.dy_row_stride);
  row->dsum = read(p.dsum, p.dsum_row_stride);
  row->dx = write(p.dx);
  row->dx_dropped = write(p.dx_dropped);
  row->y = write(p.y);
  row->mean = p.mean == nullptr ? 0 : static_cast<const A*>(p.mean)[index];
  row->rstd = static_cast<const A*>(p.rstd)[index];
}

// The first sweep over the elements [begin, end) of a group of rows.
template <class Norm, int kRows, class T>
void first_sweep(const BackwardPart<T>& part, BackwardRow<T> (&rows)[kRows], int64_t begin,
                 int64_t end) {
  using V = typename Elements<T>::V;
  using M = Math<V>;
  using S = typename Norm::Statistics;
  const auto f = rounded_to<T>(make_activation<typename Norm::Activation>(part.p.activation));
  const auto* const gammas = part.gamma;
  const auto* const betas = part.beta;
  auto* const dgammas = part.dgamma;
  auto* const dbetas = part.dbeta;
  [[maybe_unused]] auto* const dzs = part.dz;
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
    if (Norm::kActivates || emits) beta = load_parameter<V>(betas, i, extent, 0.0f);
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
      if (Norm::kActivates || emits) {
        const auto lo = f.value_and_grad(S::affine(xhat.lo, gamma.lo, beta.lo));
        const auto hi = f.value_and_grad(S::affine(xhat.hi, gamma.hi, beta.hi));
        if (emits) store(rows[r].y + i, Step<V>{lo.value, hi.value}, extent, streamed);
        if constexpr (Norm::kActivates) {
          dz = {dz.lo * lo.grad, dz.hi * hi.grad};
          store(dzs + i, dz, extent);
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

// The second sweep over the elements [begin, end) of one row; the next rows to come lie `group`
// rows on. keep: the scales of dx_dropped's elements, from the row's first one on.
template <class Statistics, class T>
void second_sweep(const BackwardPart<T>& part, const BackwardRow<T>& row, int64_t group,
                  const Accumulate<T>* keep, int64_t begin, int64_t end) {
  using V = typename Elements<T>::V;
  using S = Statistics;
  const NormBackwardParams& p = part.p;
  const auto n = static_cast<Accumulate<T>>(p.cols);
  const V mean_g(row.g_sum.total() / n);
  const V mean_gx(row.gx_sum.total() / n);
  const V mean(row.mean);
  const V rstd(row.rstd);
  const T* const x = row.x;
  const T* const dy = row.dy;
  const T* const dsum = row.dsum;
  const Accumulate<T>* const dzs = part.dz;
  T* const dx = row.dx;
  T* const dx_dropped = row.dx_dropped;
  const auto* const gammas = part.gamma;
  const V offset(scale_offset(p));
  const bool streamed = part.streamed;
  const int64_t x_ahead = group * p.x_row_stride;
  const int64_t dy_ahead = group * p.dy_row_stride;
  const int64_t dsum_ahead = group * p.dsum_row_stride;
  for_steps<T>(begin, end, [&](int64_t i, auto extent) __attribute__((always_inline)) {
    const Step<V> gamma = load_scale<Norm<S>>(gammas, offset, i, extent);
    const Step<V> v = load(x + i, extent);
    const Step<V> dz = dzs == nullptr ? load(dy + i, extent) : load(dzs + i, extent);
    V lo = S::input_grad(dz.lo * gamma.lo, S::normalize(v.lo, mean, rstd), mean_g, mean_gx, rstd);
    V hi = S::input_grad(dz.hi * gamma.hi, S::normalize(v.hi, mean, rstd), mean_g, mean_gx, rstd);
    if (dsum != nullptr) {
      const Step<V> own = load(dsum + i, extent);
      lo = lo + own.lo;
      hi = hi + own.hi;
      prefetch_step(dsum + i, dsum_ahead);
    }
    prefetch_step(x + i, x_ahead);
    prefetch_step(dy + i, dy_ahead);
    if (dx != nullptr) store(dx + i, Step<V>{lo, hi}, extent, streamed);
    if (dx_dropped != nullptr) {
      const Step<V> k = load_keep<T>(keep + i);
      store(dx_dropped + i, Step<V>{lo * k.lo, hi * k.hi}, extent, streamed);
    }
  });
}

// Rows [first, first + kRows). Each row's arithmetic and its order are the same for every kRows.
template <class Norm, int kRows, class T>
void backward_group(const BackwardPart<T>& part, int64_t first, KeepScales<T>* scales) {
  using S = typename Norm::Statistics;
  const int64_t cols = part.p.cols;
  BackwardRow<T> rows[kRows];
  for (int r = 0; r < kRows; ++r) start_row(part.p, first + r, &rows[r]);
  for_blocks<T>(
      cols, [&](int64_t begin, int64_t end) { first_sweep<Norm, kRows>(part, rows, begin, end); });
  if (part.p.dx == nullptr && part.p.dx_dropped == nullptr) return;
  for (int r = 0; r < kRows; ++r) {
    if (scales == nullptr) {
      second_sweep<S, T>(part, rows[r], kRows, nullptr, 0, cols);
      continue;
    }
    for_blocks<T>(cols, [&](int64_t begin, int64_t end) {
      const auto index = static_cast<uint64_t>((first + r) * cols + begin);
      second_sweep<S, T>(part, rows[r], kRows, scales->at(index, end - begin) - begin, begin, end);
    });
  }
}

// Whether one row's x, dy, gamma, dgamma and dbeta stay in the first-level cache (32 KiB nearly
// everywhere) between the sweeps. Then a row at a time is best; else a group of rows shares the
// loads and stores of dgamma and dbeta.
template <class T>
bool fits_first_cache(int64_t cols) {
  return cols * static_cast<int64_t>(2 * sizeof(T) + 3 * sizeof(Accumulate<T>)) <= 32 << 10;
}

// Cascade, of whole rows of sums.
template <class A>
class ChunkSums {
 public:
  ChunkSums(int64_t width, int64_t most_chunks)
      : width_(width),
        memory_(new A[width * (1 + std::bit_width(static_cast<uint64_t>(most_chunks)))]) {}

  // Where the next chunk is to be summed.
  A* start_chunk() {
    std::memset(memory_.get(), 0, width_ * sizeof(A));
    return memory_.get();
  }
  void end_chunk() {
    int64_t level = 0;
    for (uint64_t carry = count_; carry & 1; carry >>= 1) add(memory_.get(), ++level);
    std::memcpy(memory_.get() + (level + 1) * width_, memory_.get(), width_ * sizeof(A));
    ++count_;
  }
  // Adds all chunks, from the last ones on, into `out`, which is zero, and forgets them.
  void take_total(A* out) {
    int64_t level = 1;
    for (; count_ != 0; count_ >>= 1, ++level) {
      if (count_ & 1) add(out, level);
    }
  }

 private:
  void add(A* to, int64_t level) const {
    const A* from = memory_.get() + level * width_;
    for (int64_t i = 0; i < width_; ++i) to[i] += from[i];
  }

  int64_t width_;
  uint64_t count_ = 0;
  std::unique_ptr<A[]> memory_;  // of the chunk, and then of the levels
};

template <class Norm, class T>
void backward_parts(const NormBackwardParams& p, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  constexpr int kGroup = kRowGroup<Norm>;
  const int64_t width = Norm::kWeightGrads * p.cols;
  const int64_t rows_per_part = norm_rows_per_part(p.rows);
  const Parameter<A> gamma(p.gamma, p.param_dtype, p.cols);
  const Parameter<A> beta(Norm::kCentred ? p.beta : nullptr, p.param_dtype, p.cols);
  std::unique_ptr<A[]> dz;
  if (Norm::kActivates) dz.reset(new A[p.cols]);
  std::optional<KeepScales<T>> scales;
  if (p.dx_dropped != nullptr) scales.emplace(make_keeper<A>(p.rule));
  std::optional<ChunkSums<A>> chunks;
  if (p.partials != nullptr && rows_per_part > kChunkRows)
    chunks.emplace(width, ceil_div(rows_per_part, kChunkRows));
  const bool streamed = p.stream_stores && p.cols * static_cast<int64_t>(sizeof(T)) % 64 == 0 &&
                        is_aligned(p.dx) && is_aligned(p.y) && is_aligned(p.dx_dropped);
  const bool one_row = fits_first_cache<T>(p.cols);
  for (int64_t i = begin; i < end; ++i) {
    A* const part_sums = p.partials ? static_cast<A*>(p.partials) + i * width : nullptr;
    if (part_sums != nullptr) std::memset(part_sums, 0, width * sizeof(A));
    const int64_t part_end = std::min((i + 1) * rows_per_part, p.rows);
    for (int64_t row = i * rows_per_part; row < part_end;) {
      A* const sums = chunks ? chunks->start_chunk() : part_sums;
      const BackwardPart<T> part{p,
                                 gamma.data(),
                                 beta.data(),
                                 sums,
                                 sums && Norm::kCentred ? sums + p.cols : nullptr,
                                 dz.get(),
                                 streamed};
      KeepScales<T>* const keep = scales ? &*scales : nullptr;
      const int64_t chunk_end = std::min(row + kChunkRows, part_end);
      for (; !one_row && row + kGroup <= chunk_end; row += kGroup)
        backward_group<Norm, kGroup>(part, row, keep);
      for (; row < chunk_end; ++row) backward_group<Norm, 1>(part, row, keep);
      if (chunks) chunks->end_chunk();
    }
    if (chunks) chunks->take_total(part_sums);
  }
  if (streamed) stream_fence();
}

// The second step of one weight gradient, for the columns [begin, end): `partials` is dgamma's or
// dbeta's of the first part, in which there are `width` sums.
template <class G>
void reduce_parts(const NormBackwardParams& p, const Accumulate<G>* partials, int64_t width,
                  void* out, int64_t begin, int64_t end) {
  if (out == nullptr) return;
  using V = typename Elements<G>::V;
  for_steps<G>(begin, end, [&](int64_t i, auto extent) __attribute__((always_inline)) {
    Cascade<V, std::bit_width(static_cast<uint64_t>(kMaxNormParts))> lo, hi;
    for (int64_t part = 0; part < p.parts; ++part) {
      const Step<V> v = load(partials + part * width + i, extent);
      lo.add(v.lo);
      hi.add(v.hi);
    }
    store(static_cast<G*>(out) + i, Step<V>{lo.total(), hi.total()}, extent);
  });
}

}  // namespace

void norm_backward(const NormBackwardParams& p, int64_t begin, int64_t end) {
  with_type(p.dtype, [&](auto t) {
    with_norm(p, [&](auto norm) { backward_parts<decltype(norm), decltype(t)>(p, begin, end); });
  });
}

void norm_reduce_parts(const NormBackwardParams& p, int64_t begin, int64_t end) {
  const int64_t sums = p.kind == NormKind::kLayerNorm ? 2 : 1;
  with_type(p.param_dtype, [&](auto g) {
    using G = decltype(g);
    const auto* partials = static_cast<const Accumulate<G>*>(p.partials);
    reduce_parts<G>(p, partials, sums * p.cols, p.dgamma, begin, end);
    if (sums == 2) reduce_parts<G>(p, partials + p.cols, sums * p.cols, p.dbeta, begin, end);
  });
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
