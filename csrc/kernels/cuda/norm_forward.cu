// Forward of the norms. Formulas: kernels/norm.h.
//
// Memory: x is read once, y written once (4 bytes an element in 2-byte types; a residual is one
// more read and its sum one more write), the statistics are 8 bytes a row; gamma and beta come from
// the caches. Between its uses (mean, centred sums, output; mean square, output) a row waits
//   - in registers, 64 bytes of it to a thread, up to 16384 columns in 2-byte types, 8192 in
//     float32, 4096 in float64, and half of that where rows cannot be cut into vectors:
//     forward_rows;
//   - in shared memory, as long as it fits: forward_long;
//   - beyond that in global memory, and is read again: forward_long as well.
// Up to 1024 columns in 2-byte types a row is a warp or less of threads and needs no barrier.
//
// An H200 has the time of 27 instructions for the 4 bytes of an element. LayerNorm takes about 22:
// fewer elements to a thread would cost more, as the sums over the row are the same work for each
// thread. GELU behind it adds 10 (tanh) or 18 (erf), and then they are the limit, not memory.
// Dropout draws its numbers where x is loaded: 8 instructions an element in rows of whole vectors,
// 60 where elements move one by one.
#include "launchers.h"
#include "norm.cuh"

namespace memopt::kernels::cuda {
namespace {

template <class T, Access kAccess>
constexpr int kForwardElements = (kAccess == Access::kElement ? 32 : 64) / sizeof(T);

constexpr int kForwardBlockThreads = 128;  // for rows shorter than that
constexpr int kLongForwardThreads = 512;

template <class A, int kWidth>
__device__ __forceinline__ A add_squares(const A (&x)[kWidth], A sum) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) sum = Math<A>::fma(x[j], x[j], sum);
  return sum;
}

// Vector k of a row for the first time: of x, or the rounded sum with the residual, which goes to
// p.sum on the way.
template <class Norm, class T, int kElements, int kWidth, Access kAccess>
__device__ __forceinline__ void load_first(const NormForwardParams& p, int64_t row, int64_t tile,
                                           const Share<kElements, kWidth, kAccess>& share, int k,
                                           Vector<T, kWidth>* v) {
  load<Load::kEvictFirst>(static_cast<const T*>(p.x) + row * p.x_row_stride + tile, share, k, v);
  if constexpr (Norm::kAdds) {
    using A = Accumulate<T>;
    A x[kWidth], residual[kWidth];
    widen(*v, x);
    load<Load::kEvictFirst>(static_cast<const T*>(p.residual) + row * p.residual_row_stride + tile,
                            share, k, residual);
    if constexpr (Norm::kDrops) {
      // Made here for each vector: one for all, and the keys of Philox's rounds with it, would take
      // the registers that the row needs.
      const auto keeper = make_keeper<A>(p.rule);
      A keep[kWidth];
      load_keep_scales(keeper, row * p.cols + tile, share, k, keep);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) x[j] = Math<A>::fma(x[j], keep[j], residual[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) x[j] += residual[j];
    }
    narrow(x, v);
    store(*v, static_cast<T*>(p.sum) + row * p.cols + tile, share, k);
  }
}

// y = act(normalised x) for vector k of a share of the tile that begins at column `tile`.
template <class Norm, class T, class G, int kElements, int kWidth, Access kAccess, class A>
__device__ __forceinline__ void write_output(const NormForwardParams& p, const A (&x)[kWidth],
                                             Moments<A> stats, int64_t row, int64_t tile,
                                             const Share<kElements, kWidth, kAccess>& share,
                                             int k) {
  using S = typename Norm::Statistics;
  const auto f = make_activation<typename Norm::Activation>(p.activation);
  A gamma[kWidth], beta[kWidth], y[kWidth];
  load_scale<Norm, G>(p, tile, share, k, gamma);
  load_param<G>(Norm::kCentred ? p.beta : nullptr, A(0), tile, share, k, beta);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    y[j] = f.value(S::affine(S::normalize(x[j], stats.mean, stats.rstd), gamma[j], beta[j]));
  }
  store(y, static_cast<T*>(p.y) + row * p.cols + tile, share, k);
}

template <class Norm, class A>
__device__ __forceinline__ void write_stats(const NormForwardParams& p, int64_t row,
                                            Moments<A> stats) {
  if (p.rstd == nullptr || threadIdx.x != 0 || row >= p.rows) return;
  if constexpr (Norm::kCentred) static_cast<A*>(p.mean)[row] = stats.mean;
  static_cast<A*>(p.rstd)[row] = stats.rstd;
}

// Block: blockDim.x threads to a row, blockDim.y rows. The grid strides over the rows.
//
// The row waits as it lies in memory: in 2-byte types half the registers of its values in float32,
// so that two of the longest rows are under way on a multiprocessor, one waiting for memory while
// the other sums.
template <class T, Access kAccess>
constexpr int kForwardBlocks = sizeof(T) == 8 || kAccess != Access::kVector ? 1 : 2;

template <class Norm, class T, class G, Access kAccess>
__global__ void __launch_bounds__(kMaxRowThreads, kForwardBlocks<T, kAccess>)
    norm_forward_rows(NormForwardParams p) {
  using A = Accumulate<T>;
  constexpr int kElements = kForwardElements<T, kAccess>;
  constexpr int kWidth = kGroup<T, kAccess>;
  constexpr int kVectors = kElements / kWidth;
  const Share<kElements, kWidth, kAccess> columns(threadIdx.x, blockDim.x, p.cols);
  if constexpr (Norm::kDrops) leave_state(p.rule, p.state);

  const A inverse_cols = A(1) / static_cast<A>(p.cols);

  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  int64_t first = int64_t{blockIdx.x} * blockDim.y;
  for (int set = 0; first < p.rows; first += step, set ^= 1) {
    const int64_t row = first + threadIdx.y;
    const auto share = columns.of_row(row < p.rows);

    Vector<T, kWidth> raw[kVectors];
    A x[kWidth];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) load_first<Norm>(p, row, 0, share, k, &raw[k]);
    A sum = 0;  // of x, or of its squares
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      widen(raw[k], x);
      if constexpr (Norm::kCentred) {
        sum += sum_of(x);
      } else {
        sum = add_squares(x, sum);
      }
    }
    Moments<A> stats;
    if constexpr (Norm::kCentred) {
      const A mean = row_sum(sum, 0) * inverse_cols;
      Pair<A> sums = {0, 0};
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        widen(raw[k], x);
        add_centred(x, mean, share, k, &sums);
      }
      sums = row_sum(sums, 1);
      stats = moments(mean, sums.first, sums.second, p.cols, p.eps);
    } else {
      stats = {0, RootMeanSquare::rstd(row_sum(sum, set), p.cols, p.eps)};
    }
    write_stats<Norm>(p, row, stats);

#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      widen(raw[k], x);
      write_output<Norm, T, G>(p, x, stats, row, 0, share, k);
    }
  }
}

// One row to a block, in tiles. staged: the row is kept in shared memory, behind the slots of the
// row sums; a thread reads back only what it wrote itself, so that needs no barrier.
template <class Norm, class T, class G, Access kAccess>
__global__ void __launch_bounds__(kLongForwardThreads, 1)
    norm_forward_long(NormForwardParams p, bool staged) {
  using A = Accumulate<T>;
  constexpr int kElements = kForwardElements<T, kAccess>;
  constexpr int kWidth = kGroup<T, kAccess>;
  constexpr int kVectors = kElements / kWidth;
  constexpr int64_t kTile = int64_t{kLongForwardThreads} * kElements;
  const auto share_of = [&](int64_t tile) {
    return Share<kElements, kWidth, kAccess>(threadIdx.x, kLongForwardThreads, p.cols - tile);
  };
  if constexpr (Norm::kDrops) leave_state(p.rule, p.state);

  const A inverse_cols = A(1) / static_cast<A>(p.cols);

  int set = 0;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x, set ^= 1) {
    const T* row_in_memory = Norm::kAdds ? static_cast<const T*>(p.sum) + row * p.cols
                                         : static_cast<const T*>(p.x) + row * p.x_row_stride;
    T* stage = shared_memory<T>(kRowSumBytes<A>);
    const T* again = staged ? stage : row_in_memory;

    TileSum<A> row_total;  // of x, or of its squares
    for (int64_t tile = 0; tile < p.cols; tile += kTile) {
      const auto share = share_of(tile);
      A sum = 0;
      Vector<T, kWidth> raw[kVectors];
#pragma unroll
      for (int k = 0; k < kVectors; ++k) load_first<Norm>(p, row, tile, share, k, &raw[k]);
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        if (staged) store(raw[k], stage + tile, share, k);
        A x[kWidth];
        widen(raw[k], x);
        if constexpr (Norm::kCentred) {
          sum += sum_of(x);
        } else {
          sum = add_squares(x, sum);
        }
      }
      row_total.add(sum);
    }
    Moments<A> stats;
    if constexpr (Norm::kCentred) {
      const A mean = row_sum(row_total.total(), 0) * inverse_cols;
      TileSum<Pair<A>> centred;
      for (int64_t tile = 0; tile < p.cols; tile += kTile) {
        const auto share = share_of(tile);
        Pair<A> sums = {0, 0};
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
          A x[kWidth];
          load<Load::kPlain>(again + tile, share, k, x);
          add_centred(x, mean, share, k, &sums);
        }
        centred.add(sums);
      }
      const Pair<A> sums = row_sum(centred.total(), 1);
      stats = moments(mean, sums.first, sums.second, p.cols, p.eps);
    } else {
      stats = {0, RootMeanSquare::rstd(row_sum(row_total.total(), set), p.cols, p.eps)};
    }
    write_stats<Norm>(p, row, stats);

    for (int64_t tile = 0; tile < p.cols; tile += kTile) {
      const auto share = share_of(tile);
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        A x[kWidth];
        load<Load::kPlain>(again + tile, share, k, x);
        write_output<Norm, T, G>(p, x, stats, row, tile, share, k);
      }
    }
  }
}

template <class Norm>
cudaError_t launch_forward(const NormForwardParams& p, cudaStream_t stream) {
  const bool leaves_state = Norm::kDrops && p.state != nullptr;
  if (p.rows == 0 && !leaves_state) return cudaSuccess;
  const int64_t rows = p.rows == 0 ? 1 : p.rows;
  DeviceLimits limits;
  const cudaError_t error = current_device_limits(&limits);
  if (error != cudaSuccess) return error;
  return dispatch(p.dtype, p.param_dtype, [&](auto t, auto g) {
    using T = typename decltype(t)::type;
    using G = typename decltype(g)::type;
    const bool aligned = rows_are_aligned<T>(p.x, p.x_row_stride) &&
                         rows_are_aligned<T>(p.y, p.cols) && is_aligned(p.gamma) &&
                         is_aligned(p.beta) && is_aligned(p.sum) &&
                         rows_are_aligned<T>(p.residual, p.residual_row_stride);
    constexpr int64_t kSumBytes = kRowSumBytes<Accumulate<T>>;
    return dispatch_access<T>(p.cols, aligned, [&](auto a) {
      constexpr Access kAccess = decltype(a)::value;
      if (row_fits_registers<kForwardElements<T, kAccess>>(p.cols)) {
        const dim3 block = row_block<kForwardElements<T, kAccess>>(p.cols, kForwardBlockThreads);
        const dim3 grid(strided_grid(ceil_div(rows, block.y), limits));
        return launch(norm_forward_rows<Norm, T, G, kAccess>, grid, block, kSumBytes, stream, p);
      }
      const int64_t row_bytes = p.cols * int64_t{sizeof(T)};
      const bool staged = row_bytes <= limits.shared_bytes_per_block - kSumBytes;
      const dim3 grid(strided_grid(rows, limits));
      return launch(norm_forward_long<Norm, T, G, kAccess>, grid, dim3(kLongForwardThreads),
                    kSumBytes + (staged ? row_bytes : 0), stream, p, staged);
    });
  });
}

}  // namespace

cudaError_t norm_forward(const NormForwardParams& p, cudaStream_t stream) {
  return dispatch_norm(p, p.residual != nullptr, p.drops,
                       [&](auto norm) { return launch_forward<decltype(norm)>(p, stream); });
}

}  // namespace memopt::kernels::cuda
