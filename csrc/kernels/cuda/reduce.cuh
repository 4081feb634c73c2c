// Sums over the threads of a warp, a row and a block: the only file with shuffles and barriers.
//
// Every sum is a fixed tree over the participating threads, so results are the same from run to
// run; the exchange is a butterfly, so every thread ends with the same bits and no broadcast is
// needed.
#pragma once

#include "launch.cuh"

namespace memopt::kernels::cuda {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 32;

// Two sums that travel together: one barrier for both.
template <class A>
struct alignas(2 * sizeof(A)) Pair {
  A first;
  A second;
};

__device__ __forceinline__ float add_partner(float v, int offset) {
  return v + __shfl_xor_sync(0xffffffffu, v, offset);
}
__device__ __forceinline__ double add_partner(double v, int offset) {
  return v + __shfl_xor_sync(0xffffffffu, v, offset);
}
template <class A>
__device__ __forceinline__ Pair<A> add_partner(Pair<A> v, int offset) {
  return {add_partner(v.first, offset), add_partner(v.second, offset)};
}

__device__ __forceinline__ float plus(float a, float b) {
  return a + b;
}
__device__ __forceinline__ double plus(double a, double b) {
  return a + b;
}
template <class A>
__device__ __forceinline__ Pair<A> plus(Pair<A> a, Pair<A> b) {
  return {a.first + b.first, a.second + b.second};
}

// A thread's sum over the tiles of a long row, by sixteens: one chain over all of them would lose
// digits with the row's length.
template <class V>
struct TileSum {
  V sum = {};
  V part = {};
  int tiles = 0;

  __device__ __forceinline__ void add(V tile) {
    part = plus(part, tile);
    if (++tiles % 16 == 0) {
      sum = plus(sum, part);
      part = {};
    }
  }
  __device__ __forceinline__ V total() const { return plus(sum, part); }
};

// Sum over each aligned group of `lanes` lanes, a power of two. All lanes of the warp take part.
template <class V>
__device__ __forceinline__ V lane_sum(V v, int lanes) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    if (offset < lanes) v = add_partner(v, offset);
  }
  return v;
}

// Row sums: blockDim.x threads share a row (a power of two up to a warp, or whole warps),
// blockDim.y rows share the block. The warps of a row meet in shared memory, of which a block needs
// row_sum_bytes. Consecutive sums must use different sets (0 and 1), and then one barrier a sum is
// enough: whoever writes a set again has passed the barrier of the sum in between, and so have all
// who read the set before.
template <class A>
constexpr int64_t kRowSumBytes = 2 * kMaxWarps * sizeof(Pair<A>);

template <class V>
__device__ __forceinline__ V row_sum(V v, int set) {
  const int threads = static_cast<int>(blockDim.x);
  v = lane_sum(v, threads);
  if (threads <= kWarp) return v;
  const int warps = threads / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  V* slots = shared_memory<V>() + set * kMaxWarps + static_cast<int>(threadIdx.y) * warps;
  if (lane == 0) slots[static_cast<int>(threadIdx.x) / kWarp] = v;
  __syncthreads();
  return lane_sum(lane < warps ? slots[lane] : V{}, kWarp);
}

// The largest value over the threads of a row that is blockDim.x whole warps; NaN if one is. It
// uses the slots of row_sum's set as a sum of that set would.
__device__ __forceinline__ float larger(float a, float b) {
  return a > b || a != a ? a : b;
}
__device__ __forceinline__ double larger(double a, double b) {
  return a > b || a != a ? a : b;
}

template <class A>
__device__ __forceinline__ A lane_maximum(A v) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    v = larger(v, __shfl_xor_sync(0xffffffffu, v, offset));
  return v;
}

template <class A>
__device__ __forceinline__ A row_maximum(A v, int set) {
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  v = lane_maximum(v);
  A* slots = shared_memory<A>() + 2 * set * kMaxWarps;
  if (lane == 0) slots[static_cast<int>(threadIdx.x) / kWarp] = v;
  __syncthreads();
  return lane_maximum(lane < warps ? slots[lane] : slots[0]);
}

// Adds up `count` values of each of the block's blockDim.y rows, which the rows' threads have
// written to shared memory one row after the other, and writes the sums to `out`.
template <class A>
__device__ __forceinline__ void sum_block_rows(const A* values, int count, A* out) {
  __syncthreads();
  const int threads = static_cast<int>(blockDim.x * blockDim.y);
  for (int i = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x); i < count; i += threads) {
    A sum = 0;
    for (int row = 0; row < static_cast<int>(blockDim.y); ++row) sum += values[row * count + i];
    out[i] = sum;
  }
}

// In a block of kWarp x kWarp threads: the sum over the threads with threadIdx.x = c, in the
// threads with threadIdx.y = c. The padding keeps both accesses free of bank conflicts.
template <class A>
constexpr int64_t kTransposedSumBytes = kWarp * (kWarp + 1) * sizeof(A);

template <class A>
__device__ __forceinline__ A transposed_sum(A v) {
  A* square = shared_memory<A>();
  square[threadIdx.y * (kWarp + 1) + threadIdx.x] = v;
  __syncthreads();
  return lane_sum(square[threadIdx.x * (kWarp + 1) + threadIdx.y], kWarp);
}

}  // namespace memopt::kernels::cuda
