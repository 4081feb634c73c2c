// LayerNorm backward, through an activation behind it.
//
// Memory: x and dy are read once, dx is written once (over dy if asked), and y once if it is
// re-emitted: 6 or 8 bytes an element in 2-byte types. The weight gradients come from the same
// pass: the grid is persistent, a thread owns the same columns of every row that it meets and sums
// their gradients; at its end each block (a "part") writes one row of partial sums, and
// layer_norm_reduce_parts() adds the parts in order. The sums, and a row between its two uses, are
//   - in registers, up to 8192 columns in 2-byte types, 4096 in float32, 2048 in float64, and half
//     of that where rows cannot be cut into vectors: backward_rows;
//   - in shared memory, as long as they fit, the sums first: backward_long;
//   - beyond that, the sums are in `partials` and the row is read again: backward_long as well.
//
// A thread of backward_rows holds 16 elements in 2-byte types: two sums for each, two values that
// wait for the row's sums, and the next row's x and dy, already on their way. That is what 128
// registers hold; so 512 threads run on a multiprocessor, with 32 KB of loads in flight, where
// 4.3 TB/s x 0.8 us of latency asks for 26 KB on an H200. Some 30 instructions an element take
// three quarters of the time of its 6 bytes there; behind GELU some 50 take a little longer.
#pragma once

#include "launchers.h"
#include "layer_norm.cuh"

namespace memopt::kernels::cuda {

template <class T, Access kAccess>
constexpr int kBackwardElements = (kAccess == Access::kElement ? 16 : 32) / sizeof(T);

constexpr int kBackwardBlockThreads = 256;  // for rows shorter than that
constexpr int kBackwardThreadsPerMultiprocessor = 512;
template <class T>  // erfc() in float64 takes more than the 64 registers of 1024 threads
constexpr int kLongBackwardThreads = sizeof(T) == 8 ? 512 : 1024;

// Adds the rows of p.partials, in order, into p.dgamma and p.dbeta.
cudaError_t layer_norm_reduce_parts(const LayerNormBackwardParams& p, cudaStream_t stream);

// The first step for vector k of a share of the tile that begins at column `tile`: xhat, g = dz
// gamma and dz. With `y` (the row's), re-emits y.
template <class T, class G, class Activation, int kElements, int kWidth, Access kAccess, class A>
__device__ __forceinline__ void differentiate(const LayerNormBackwardParams& p,
                                              const Vector<T, kWidth>& x,
                                              const Vector<T, kWidth>& dy, Moments<A> stats, T* y,
                                              int64_t tile,
                                              const Share<kElements, kWidth, kAccess>& share, int k,
                                              A (&xhat)[kWidth], A (&g)[kWidth], A (&dz)[kWidth]) {
  A gamma[kWidth], beta[kWidth], value[kWidth];
  const bool needs_beta = Activation::kNeedsPreactivation || y != nullptr;
  load_param<G>(p.gamma, A(1), tile, share, k, gamma);
  load_param<G>(needs_beta ? p.beta : nullptr, A(0), tile, share, k, beta);
  widen(x, xhat);
  widen(dy, dz);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    xhat[j] = normalize(xhat[j], stats.mean, stats.rstd);
    const ValueGrad<A> act = Activation::value_and_grad(scale_shift(xhat[j], gamma[j], beta[j]));
    value[j] = act.value;
    dz[j] = dz[j] * act.grad;
    g[j] = dz[j] * gamma[j];
  }
  if (y != nullptr) store(value, y + tile, share, k);
}

template <class A, int kWidth>
__device__ __forceinline__ void add_row_sums(const A (&g)[kWidth], const A (&xhat)[kWidth],
                                             Pair<A>* sums) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    sums->first += g[j];
    sums->second = Math<A>::fma(g[j], xhat[j], sums->second);
  }
}

// The second step, with the row's sums at hand.
template <class T, int kElements, int kWidth, Access kAccess, class A>
__device__ __forceinline__ void write_input_grad(const LayerNormBackwardParams& p,
                                                 const A (&g)[kWidth], const A (&xhat)[kWidth],
                                                 Pair<A> means, A rstd, int64_t row, int64_t tile,
                                                 const Share<kElements, kWidth, kAccess>& share,
                                                 int k) {
  A dx[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j)
    dx[j] = input_grad(g[j], xhat[j], means.first, means.second, rstd);
  store(dx, static_cast<T*>(p.dx) + row * p.cols + tile, share, k);
}

// Block: blockDim.x threads to a row, blockDim.y rows. The grid strides over the rows; block i is
// part i.
template <class T, class G, class Activation, Access kAccess>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    layer_norm_backward_rows(LayerNormBackwardParams p) {
  using A = Accumulate<T>;
  constexpr int kElements = kBackwardElements<T, kAccess>;
  constexpr int kWidth = kGroup<T, kAccess>;
  constexpr int kVectors = kElements / kWidth;
  const Share<kElements, kWidth, kAccess> columns(threadIdx.x, blockDim.x, p.cols);
  constexpr bool kPrefetch = kAccess == Access::kVector;
  const A inverse_cols = A(1) / static_cast<A>(p.cols);

  // Vectors are fetched one row ahead. Single elements would take more registers than there are:
  // they are fetched as they are used. Rows beyond the last are rows of zeros, which add nothing.
  auto share = columns;
  Vector<T, kWidth> x[kVectors], dy[kVectors];
  Moments<A> stats;
  const auto fetch = [&](int64_t row, int k) {
    load<Reuse::kNever>(static_cast<const T*>(p.x) + row * p.x_row_stride, share, k, &x[k]);
    load<Reuse::kNever>(static_cast<const T*>(p.dy) + row * p.dy_row_stride, share, k, &dy[k]);
  };
  const auto start_row = [&](int64_t row) {
    share = columns.of_row(row < p.rows);
    stats = {0, 0};
    if (row < p.rows)
      stats = {static_cast<const A*>(p.mean)[row], static_cast<const A*>(p.rstd)[row]};
#pragma unroll
    for (int k = 0; kPrefetch && k < kVectors; ++k) fetch(row, k);
  };

  A dgamma[kVectors][kWidth] = {}, dbeta[kVectors][kWidth] = {};
  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  int64_t first = int64_t{blockIdx.x} * blockDim.y;
  if (kPrefetch) start_row(first + threadIdx.y);
  for (int set = 0; first < p.rows; first += step, set ^= 1) {
    const int64_t row = first + threadIdx.y;
    if (!kPrefetch) start_row(row);
    T* y = p.y == nullptr ? nullptr : static_cast<T*>(p.y) + row * p.cols;
    A g[kVectors][kWidth], xhat[kVectors][kWidth];
    Pair<A> sums = {0, 0};
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (!kPrefetch) fetch(row, k);
      A dz[kWidth];
      differentiate<T, G, Activation>(p, x[k], dy[k], stats, y, 0, share, k, xhat[k], g[k], dz);
      add_row_sums(g[k], xhat[k], &sums);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        dgamma[k][j] = Math<A>::fma(dz[j], xhat[k][j], dgamma[k][j]);
        dbeta[k][j] += dz[j];
      }
    }
    const A rstd = stats.rstd;
    const auto current = share;
    if (kPrefetch) start_row(row + step);
    if (p.dx != nullptr) {
      sums = row_sum(sums, set);
      const Pair<A> means = {sums.first * inverse_cols, sums.second * inverse_cols};
#pragma unroll
      for (int k = 0; k < kVectors; ++k)
        write_input_grad<T>(p, g[k], xhat[k], means, rstd, row, 0, current, k);
    }
  }

  if (p.partials == nullptr) return;
  A* part = static_cast<A*>(p.partials) + int64_t{blockIdx.x} * 2 * p.cols;
  const bool rows_share_block = blockDim.y > 1;
  A* block_sums = shared_memory<A>(kRowSumBytes<A>);
  A* to = rows_share_block ? block_sums + threadIdx.y * 2 * p.cols : part;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    store(dgamma[k], to, columns, k);
    store(dbeta[k], to + p.cols, columns, k);
  }
  if (rows_share_block) sum_block_rows(block_sums, static_cast<int>(2 * p.cols), part);
}

// What of a long row's state is in shared memory, behind the slots of the row sums.
struct LongBackwardPlan {
  bool sums_shared;   // dgamma, dbeta of the part; else in `partials`
  bool staged;        // x and dy of the row; else they are read again
  int64_t sum_bytes;  // of the sums, a multiple of 16
  int64_t row_bytes;  // of x, and again of dy
};

// One row to a block, in tiles of one vector a thread; block i is part i. A thread reads back only
// what it wrote itself, so the sums of a row are the only barrier.
template <class T, class G, class Activation, Access kAccess>
__global__ void __launch_bounds__(kLongBackwardThreads<T>, 1)
    layer_norm_backward_long(LayerNormBackwardParams p, LongBackwardPlan plan) {
  using A = Accumulate<T>;
  constexpr int kWidth = kGroup<T, kAccess>;
  constexpr int64_t kTile = int64_t{kLongBackwardThreads<T>} * kWidth;
  const auto share_of = [&](int64_t tile) {
    return Share<kWidth, kWidth, kAccess>(threadIdx.x, kLongBackwardThreads<T>, p.cols - tile);
  };
  const A inverse_cols = A(1) / static_cast<A>(p.cols);

  A* part = p.partials == nullptr ? nullptr
                                  : static_cast<A*>(p.partials) + int64_t{blockIdx.x} * 2 * p.cols;
  A* weight_sums = plan.sums_shared ? shared_memory<A>(kRowSumBytes<A>) : part;
  T* stage_x = shared_memory<T>(kRowSumBytes<A> + plan.sum_bytes);
  T* stage_dy = shared_memory<T>(kRowSumBytes<A> + plan.sum_bytes + plan.row_bytes);
  for (int64_t tile = 0; part != nullptr && tile < p.cols; tile += kTile) {
    const A zeros[kWidth] = {};
    store(zeros, weight_sums + tile, share_of(tile), 0);
    store(zeros, weight_sums + p.cols + tile, share_of(tile), 0);
  }

  int set = 0;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x, set ^= 1) {
    const T* x_row = static_cast<const T*>(p.x) + row * p.x_row_stride;
    const T* dy_row = static_cast<const T*>(p.dy) + row * p.dy_row_stride;
    T* y_row = p.y == nullptr ? nullptr : static_cast<T*>(p.y) + row * p.cols;
    const Moments<A> stats = {static_cast<const A*>(p.mean)[row],
                              static_cast<const A*>(p.rstd)[row]};

    Pair<A> sums = {0, 0};
    for (int64_t tile = 0; tile < p.cols; tile += kTile) {
      const auto share = share_of(tile);
      Vector<T, kWidth> x, dy;
      load<Reuse::kNever>(x_row + tile, share, 0, &x);
      load<Reuse::kNever>(dy_row + tile, share, 0, &dy);
      if (plan.staged) {
        store(x, stage_x + tile, share, 0);
        store(dy, stage_dy + tile, share, 0);
      }
      A xhat[kWidth], g[kWidth], dz[kWidth];
      differentiate<T, G, Activation>(p, x, dy, stats, y_row, tile, share, 0, xhat, g, dz);
      add_row_sums(g, xhat, &sums);
      if (part != nullptr) {
        A sum[kWidth];  // of dgamma, then of dbeta
        load<Reuse::kLater>(weight_sums + tile, share, 0, sum);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum[j] = Math<A>::fma(dz[j], xhat[j], sum[j]);
        store(sum, weight_sums + tile, share, 0);
        load<Reuse::kLater>(weight_sums + p.cols + tile, share, 0, sum);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum[j] += dz[j];
        store(sum, weight_sums + p.cols + tile, share, 0);
      }
    }
    if (p.dx == nullptr) continue;

    sums = row_sum(sums, set);
    const Pair<A> means = {sums.first * inverse_cols, sums.second * inverse_cols};
    for (int64_t tile = 0; tile < p.cols; tile += kTile) {
      const auto share = share_of(tile);
      Vector<T, kWidth> x, dy;
      load<Reuse::kLater>((plan.staged ? stage_x : x_row) + tile, share, 0, &x);
      load<Reuse::kLater>((plan.staged ? stage_dy : dy_row) + tile, share, 0, &dy);
      A xhat[kWidth], g[kWidth], dz[kWidth];
      differentiate<T, G, Activation, kWidth>(p, x, dy, stats, nullptr, tile, share, 0, xhat, g,
                                              dz);
      write_input_grad<T>(p, g, xhat, means, stats.rstd, row, tile, share, 0);
    }
  }

  for (int64_t tile = 0; part != nullptr && plan.sums_shared && tile < p.cols; tile += kTile) {
    const auto share = share_of(tile);
    Vector<A, kWidth> dgamma, dbeta;
    load<Reuse::kLater>(weight_sums + tile, share, 0, &dgamma);
    load<Reuse::kLater>(weight_sums + p.cols + tile, share, 0, &dbeta);
    store(dgamma, part + tile, share, 0);
    store(dbeta, part + p.cols + tile, share, 0);
  }
}

template <class Activation>
cudaError_t launch_layer_norm_backward(const LayerNormBackwardParams& p, cudaStream_t stream) {
  const bool nothing_wanted = p.dx == nullptr && p.y == nullptr && p.partials == nullptr;
  if (nothing_wanted || (p.rows == 0 && p.partials == nullptr)) return cudaSuccess;
  DeviceLimits limits;
  cudaError_t error = current_device_limits(&limits);
  int64_t parts = p.parts;
  if (error == cudaSuccess && p.partials == nullptr) {
    error = layer_norm_backward_parts(p.rows, p.cols, p.dtype, &parts);
  }
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(parts));
  error = dispatch(p.dtype, p.param_dtype, [&](auto t, auto g) {
    using T = typename decltype(t)::type;
    using G = typename decltype(g)::type;
    using A = Accumulate<T>;
    const bool aligned = rows_are_aligned<T>(p.x, p.x_row_stride) &&
                         rows_are_aligned<T>(p.dy, p.dy_row_stride) &&
                         rows_are_aligned<T>(p.dx, p.cols) && is_aligned(p.y) &&
                         is_aligned(p.gamma) && is_aligned(p.beta) && is_aligned(p.partials);
    const int64_t sum_bytes = ceil_div(2 * p.cols * int64_t{sizeof(A)}, 16) * 16;
    return dispatch_access<T>(p.cols, aligned, [&](auto a) {
      constexpr Access kAccess = decltype(a)::value;
      if (row_fits_registers<kBackwardElements<T, kAccess>>(p.cols)) {
        const dim3 block = row_block<kBackwardElements<T, kAccess>>(p.cols, kBackwardBlockThreads);
        return launch(layer_norm_backward_rows<T, G, Activation, kAccess>, grid, block,
                      kRowSumBytes<A> + (block.y > 1 ? block.y * sum_bytes : 0), stream, p);
      }
      int64_t left = limits.shared_bytes_per_block - kRowSumBytes<A>;
      LongBackwardPlan plan = {};
      plan.sums_shared = p.partials != nullptr && sum_bytes <= left;
      plan.sum_bytes = plan.sums_shared ? sum_bytes : 0;
      left -= plan.sum_bytes;
      const int64_t row_bytes = ceil_div(p.cols * int64_t{sizeof(T)}, 16) * 16;
      plan.staged = p.dx != nullptr && 2 * row_bytes <= left;
      plan.row_bytes = plan.staged ? row_bytes : 0;
      return launch(layer_norm_backward_long<T, G, Activation, kAccess>, grid,
                    dim3(kLongBackwardThreads<T>),
                    kRowSumBytes<A> + plan.sum_bytes + 2 * plan.row_bytes, stream, p, plan);
    });
  });
  if (error != cudaSuccess || p.partials == nullptr) return error;
  return layer_norm_reduce_parts(p, stream);
}

}  // namespace memopt::kernels::cuda
