// Backward of rows that are too long for registers.
#pragma once

#include "norm_backward_steps.cuh"

namespace memopt::kernels::cuda {

// What of a long row's state is in shared memory, behind the slots of the row sums.
struct LongBackwardPlan {
  bool sums_shared;   // dgamma, dbeta of the part; else in `partials`
  bool staged;        // x and dy of the row; else they are read again
  int64_t sum_bytes;  // of the sums, a multiple of 16
  int64_t row_bytes;  // of x, and again of dy
};

// One row to a block, in tiles of one vector a thread; block i is part i. A thread reads back only
// what it wrote itself, so the sums of a row are the only barrier.
template <class Norm, class T, class G, Access kAccess>
__global__ void __launch_bounds__(kLongBackwardThreads<T>, 1)
    norm_backward_long(NormBackwardParams p, LongBackwardPlan plan) {
  using A = Accumulate<T>;
  constexpr int kWidth = kGroup<T, kAccess>;
  constexpr int64_t kTile = int64_t{kLongBackwardThreads<T>} * kWidth;
  const auto share_of = [&](int64_t tile) {
    return Share<kWidth, kWidth, kAccess>(threadIdx.x, kLongBackwardThreads<T>, p.cols - tile);
  };
  const A inverse_cols = A(1) / static_cast<A>(p.cols);

  constexpr int kSums = Norm::kWeightGrads;
  A* part = nullptr;
  if (p.partials != nullptr)
    part = static_cast<A*>(p.partials) + int64_t{blockIdx.x} * kSums * p.cols;
  A* weight_sums = plan.sums_shared ? shared_memory<A>(kRowSumBytes<A>) : part;
  T* stage_x = shared_memory<T>(kRowSumBytes<A> + plan.sum_bytes);
  T* stage_dy = shared_memory<T>(kRowSumBytes<A> + plan.sum_bytes + plan.row_bytes);
  for (int64_t tile = 0; part != nullptr && tile < p.cols; tile += kTile) {
    const A zeros[kWidth] = {};
    store(zeros, weight_sums + tile, share_of(tile), 0);
    if constexpr (Norm::kCentred) store(zeros, weight_sums + p.cols + tile, share_of(tile), 0);
  }

  int set = 0;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x, set ^= 1) {
    const T* x_row = static_cast<const T*>(p.x) + row * p.x_row_stride;
    const T* dy_row = static_cast<const T*>(p.dy) + row * p.dy_row_stride;
    T* y_row = p.y == nullptr ? nullptr : static_cast<T*>(p.y) + row * p.cols;
    const Moments<A> stats = row_stats<Norm, A>(p, row);

    Pair<A> sums = {0, 0};
    for (int64_t tile = 0; tile < p.cols; tile += kTile) {
      const auto share = share_of(tile);
      Vector<T, kWidth> x, dy;
      load<Load::kEvictFirst>(x_row + tile, share, 0, &x);
      load<Load::kEvictFirst>(dy_row + tile, share, 0, &dy);
      if (plan.staged) {
        store(x, stage_x + tile, share, 0);
        store(dy, stage_dy + tile, share, 0);
      }
      A xhat[kWidth], g[kWidth], dz[kWidth];
      differentiate<Norm, T, G>(p, x, dy, stats, y_row, tile, share, 0, xhat, g, dz);
      add_row_sums(g, xhat, &sums);
      if (part != nullptr) {
        A sum[kWidth];  // of dgamma, then of dbeta
        load<Load::kPlain>(weight_sums + tile, share, 0, sum);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum[j] = Math<A>::fma(dz[j], xhat[j], sum[j]);
        store(sum, weight_sums + tile, share, 0);
        if constexpr (Norm::kCentred) {
          load<Load::kPlain>(weight_sums + p.cols + tile, share, 0, sum);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) sum[j] += dz[j];
          store(sum, weight_sums + p.cols + tile, share, 0);
        }
      }
    }
    if (!wants_input_grad<Norm>(p)) continue;

    const Pair<A> means = row_means<Norm>(sums, set, inverse_cols);
    for (int64_t tile = 0; tile < p.cols; tile += kTile) {
      const auto share = share_of(tile);
      Vector<T, kWidth> x, dy, dsum;
      load_dsum<Norm>(p, row, tile, share, 0, &dsum);
      load<Load::kPlain>((plan.staged ? stage_x : x_row) + tile, share, 0, &x);
      load<Load::kPlain>((plan.staged ? stage_dy : dy_row) + tile, share, 0, &dy);
      A xhat[kWidth], g[kWidth], dz[kWidth];
      differentiate<Norm, T, G>(p, x, dy, stats, static_cast<T*>(nullptr), tile, share, 0, xhat, g,
                                dz);
      write_input_grad<Norm, T>(p, g, xhat, dsum, means, stats.rstd, row, tile, share, 0);
    }
  }

  for (int64_t tile = 0; part != nullptr && plan.sums_shared && tile < p.cols; tile += kTile) {
    const auto share = share_of(tile);
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      Vector<A, kWidth> sum;
      load<Load::kPlain>(weight_sums + i * p.cols + tile, share, 0, &sum);
      store(sum, part + i * p.cols + tile, share, 0);
    }
  }
}

}  // namespace memopt::kernels::cuda
