// Backward of rows that stay in registers.
#pragma once

#include "norm_backward_steps.cuh"

namespace memopt::kernels::cuda {

// Block: blockDim.x threads to a row, blockDim.y rows. The grid strides over the rows; block i is
// part i.
template <class Norm, class T, class G, Access kAccess>
__global__ void __launch_bounds__(kMaxRowThreads, 1) norm_backward_rows(NormBackwardParams p) {
  using A = Accumulate<T>;
  constexpr int kElements = kBackwardElements<T, kAccess>;
  constexpr int kWidth = kGroup<T, kAccess>;
  constexpr int kVectors = kElements / kWidth;
  constexpr int kSums = Norm::kWeightGrads;
  const Share<kElements, kWidth, kAccess> columns(threadIdx.x, blockDim.x, p.cols);
  constexpr bool kPrefetch = kAccess == Access::kVector;
  const A inverse_cols = A(1) / static_cast<A>(p.cols);

  // Vectors are fetched one row ahead. Single elements would take more registers than there are:
  // they are fetched as they are used. Rows beyond the last are rows of zeros, which add nothing.
  auto share = columns;
  Vector<T, kWidth> x[kVectors], dy[kVectors];
  Moments<A> stats;
  const auto fetch = [&](int64_t row, int k) {
    load<Load::kEvictFirst>(static_cast<const T*>(p.x) + row * p.x_row_stride, share, k, &x[k]);
    load<Load::kEvictFirst>(static_cast<const T*>(p.dy) + row * p.dy_row_stride, share, k, &dy[k]);
  };
  const auto start_row = [&](int64_t row) {
    share = columns.of_row(row < p.rows);
    stats = {0, 0};
    if (row < p.rows) stats = row_stats<Norm, A>(p, row);
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
      differentiate<Norm, T, G>(p, x[k], dy[k], stats, y, 0, share, k, xhat[k], g[k], dz);
      add_row_sums(g[k], xhat[k], &sums);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        dgamma[k][j] = Math<A>::fma(dz[j], xhat[k][j], dgamma[k][j]);
        if constexpr (Norm::kCentred) dbeta[k][j] += dz[j];
      }
    }
    const A rstd = stats.rstd;
    const auto current = share;
    if (kPrefetch) start_row(row + step);
    if (wants_input_grad<Norm>(p)) {
      Vector<T, kWidth> dsum[kVectors];
#pragma unroll
      for (int k = 0; kPrefetch && k < kVectors; ++k)
        load_dsum<Norm>(p, row, 0, current, k, &dsum[k]);
      const Pair<A> means = row_means<Norm>(sums, set, inverse_cols);
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        if (!kPrefetch) load_dsum<Norm>(p, row, 0, current, k, &dsum[k]);
        write_input_grad<Norm, T>(p, g[k], xhat[k], dsum[k], means, rstd, row, 0, current, k);
      }
    }
  }

  if (p.partials == nullptr) return;
  A* part = static_cast<A*>(p.partials) + int64_t{blockIdx.x} * kSums * p.cols;
  const bool rows_share_block = blockDim.y > 1;
  A* block_sums = shared_memory<A>(kRowSumBytes<A>);
  A* to = rows_share_block ? block_sums + threadIdx.y * kSums * p.cols : part;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    store(dgamma[k], to, columns, k);
    if constexpr (Norm::kCentred) store(dbeta[k], to + p.cols, columns, k);
  }
  if (rows_share_block) sum_block_rows(block_sums, static_cast<int>(kSums * p.cols), part);
}

}  // namespace memopt::kernels::cuda
