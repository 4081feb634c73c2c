// LayerNorm forward, with an activation behind it.
//
// Memory: x is read once, y written once (4 bytes an element in 2-byte types), the statistics are 8
// bytes a row; gamma and beta come from the caches. Between its three uses (mean, centred sums,
// output) a row waits
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
#pragma once

#include "layer_norm.cuh"

namespace memopt::kernels::cuda {

template <class T, Access kAccess>
constexpr int kForwardElements = (kAccess == Access::kElement ? 32 : 64) / sizeof(T);

constexpr int kForwardBlockThreads = 128;  // for rows shorter than that
constexpr int kLongForwardThreads = 512;

template <class A, int kWidth>
__device__ __forceinline__ A sum_of(const A (&x)[kWidth]) {
  A sum = 0;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) sum += x[j];
  return sum;
}

// Adds d = x - mean and d^2 of vector k to `sums`. What is beyond the tile was loaded as zero and
// is left out here: after centring it would be -mean.
template <class A, int kElements, int kWidth, Access kAccess>
__device__ __forceinline__ void add_centred(const A (&x)[kWidth], A mean,
                                            const Share<kElements, kWidth, kAccess>& share, int k,
                                            Pair<A>* sums) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const A d = share.owns(k, j) ? x[j] - mean : A(0);
    sums->first += d;
    sums->second = Math<A>::fma(d, d, sums->second);
  }
}

// y = act(normalised x) for vector k of a share of the tile that begins at column `tile`.
template <class T, class G, class Activation, int kElements, int kWidth, Access kAccess, class A>
__device__ __forceinline__ void write_output(const LayerNormForwardParams& p, const A (&x)[kWidth],
                                             Moments<A> stats, int64_t row, int64_t tile,
                                             const Share<kElements, kWidth, kAccess>& share,
                                             int k) {
  A gamma[kWidth], beta[kWidth], y[kWidth];
  load_param<G>(p.gamma, A(1), tile, share, k, gamma);
  load_param<G>(p.beta, A(0), tile, share, k, beta);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    y[j] =
        Activation::value(scale_shift(normalize(x[j], stats.mean, stats.rstd), gamma[j], beta[j]));
  }
  store(y, static_cast<T*>(p.y) + row * p.cols + tile, share, k);
}

template <class A>
__device__ __forceinline__ void write_stats(const LayerNormForwardParams& p, int64_t row,
                                            Moments<A> stats) {
  if (p.mean == nullptr || threadIdx.x != 0 || row >= p.rows) return;
  static_cast<A*>(p.mean)[row] = stats.mean;
  static_cast<A*>(p.rstd)[row] = stats.rstd;
}

// Block: blockDim.x threads to a row, blockDim.y rows. The grid strides over the rows.
template <class T, class G, class Activation, Access kAccess>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    layer_norm_forward_rows(LayerNormForwardParams p) {
  using A = Accumulate<T>;
  constexpr int kElements = kForwardElements<T, kAccess>;
  constexpr int kWidth = kGroup<T, kAccess>;
  constexpr int kVectors = kElements / kWidth;
  const Share<kElements, kWidth, kAccess> columns(threadIdx.x, blockDim.x, p.cols);

  const A inverse_cols = A(1) / static_cast<A>(p.cols);

  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  for (int64_t first = int64_t{blockIdx.x} * blockDim.y; first < p.rows; first += step) {
    const int64_t row = first + threadIdx.y;
    const auto share = columns.of_row(row < p.rows);

    const T* x_row = static_cast<const T*>(p.x) + row * p.x_row_stride;
    A x[kVectors][kWidth];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) load<Reuse::kNever>(x_row, share, k, x[k]);
    A sum = 0;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) sum += sum_of(x[k]);
    const A mean = row_sum(sum, 0) * inverse_cols;

    Pair<A> sums = {0, 0};
#pragma unroll
    for (int k = 0; k < kVectors; ++k) add_centred(x[k], mean, share, k, &sums);
    sums = row_sum(sums, 1);
    const Moments<A> stats = moments(mean, sums.first, sums.second, p.cols, p.eps);
    write_stats(p, row, stats);

#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      write_output<T, G, Activation>(p, x[k], stats, row, 0, share, k);
  }
}

// One row to a block, in tiles. staged: the row is kept in shared memory, behind the slots of the
// row sums; a thread reads back only what it wrote itself, so that needs no barrier.
template <class T, class G, class Activation, Access kAccess>
__global__ void __launch_bounds__(kLongForwardThreads, 1)
    layer_norm_forward_long(LayerNormForwardParams p, bool staged) {
  using A = Accumulate<T>;
  constexpr int kElements = kForwardElements<T, kAccess>;
  constexpr int kWidth = kGroup<T, kAccess>;
  constexpr int kVectors = kElements / kWidth;
  constexpr int64_t kTile = int64_t{kLongForwardThreads} * kElements;
  const auto share_of = [&](int64_t tile) {
    return Share<kElements, kWidth, kAccess>(threadIdx.x, kLongForwardThreads, p.cols - tile);
  };

  const A inverse_cols = A(1) / static_cast<A>(p.cols);

  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const T* x_row = static_cast<const T*>(p.x) + row * p.x_row_stride;
    T* stage = shared_memory<T>(kRowSumBytes<A>);
    const T* again = staged ? stage : x_row;

    A sum = 0;
    for (int64_t tile = 0; tile < p.cols; tile += kTile) {
      const auto share = share_of(tile);
      Vector<T, kWidth> raw[kVectors];
#pragma unroll
      for (int k = 0; k < kVectors; ++k) load<Reuse::kNever>(x_row + tile, share, k, &raw[k]);
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        if (staged) store(raw[k], stage + tile, share, k);
        A x[kWidth];
        widen(raw[k], x);
        sum += sum_of(x);
      }
    }
    const A mean = row_sum(sum, 0) * inverse_cols;

    Pair<A> sums = {0, 0};
    for (int64_t tile = 0; tile < p.cols; tile += kTile) {
      const auto share = share_of(tile);
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        A x[kWidth];
        load<Reuse::kLater>(again + tile, share, k, x);
        add_centred(x, mean, share, k, &sums);
      }
    }
    sums = row_sum(sums, 1);
    const Moments<A> stats = moments(mean, sums.first, sums.second, p.cols, p.eps);
    write_stats(p, row, stats);

    for (int64_t tile = 0; tile < p.cols; tile += kTile) {
      const auto share = share_of(tile);
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        A x[kWidth];
        load<Reuse::kLater>(again + tile, share, k, x);
        write_output<T, G, Activation>(p, x, stats, row, tile, share, k);
      }
    }
  }
}

template <class Activation>
cudaError_t launch_layer_norm_forward(const LayerNormForwardParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  DeviceLimits limits;
  const cudaError_t error = current_device_limits(&limits);
  if (error != cudaSuccess) return error;
  return dispatch(p.dtype, p.param_dtype, [&](auto t, auto g) {
    using T = typename decltype(t)::type;
    using G = typename decltype(g)::type;
    const bool aligned = rows_are_aligned<T>(p.x, p.x_row_stride) &&
                         rows_are_aligned<T>(p.y, p.cols) && is_aligned(p.gamma) &&
                         is_aligned(p.beta);
    constexpr int64_t kSumBytes = kRowSumBytes<Accumulate<T>>;
    return dispatch_access<T>(p.cols, aligned, [&](auto a) {
      constexpr Access kAccess = decltype(a)::value;
      if (row_fits_registers<kForwardElements<T, kAccess>>(p.cols)) {
        const dim3 block = row_block<kForwardElements<T, kAccess>>(p.cols, kForwardBlockThreads);
        const dim3 grid(strided_grid(ceil_div(p.rows, block.y), limits));
        return launch(layer_norm_forward_rows<T, G, Activation, kAccess>, grid, block, kSumBytes,
                      stream, p);
      }
      const int64_t row_bytes = p.cols * int64_t{sizeof(T)};
      const bool staged = row_bytes <= limits.shared_bytes_per_block - kSumBytes;
      const dim3 grid(strided_grid(p.rows, limits));
      return launch(layer_norm_forward_long<T, G, Activation, kAccess>, grid,
                    dim3(kLongForwardThreads), kSumBytes + (staged ? row_bytes : 0), stream, p,
                    staged);
    });
  });
}

}  // namespace memopt::kernels::cuda
