// Dropout, forward and backward alike.
//
// Memory: reads x, writes y (over x if asked): 4 bytes an element in 2-byte types, each moved once
// by 16-byte vectors. A vector of 8 takes one Philox call, about 60 instructions of which 20 are
// wide multiplications; a vector of 4 floats takes one too, and has twice the time to hide it in.
// Where the arrays are not aligned a thread keeps its vectors and moves them element by element;
// only in a last tile that ends inside a vector does each element take a call of its own.
#include "../dropout.h"

#include "launch.cuh"
#include "launchers.h"
#include "vec.cuh"

namespace memopt::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
constexpr int kElements = sizeof(T) == 8 ? 4 : 16;

template <class T>
constexpr int64_t kTile = kThreads * kElements<T>;

template <class T, Access kAccess>
__device__ __forceinline__ void drop_tile(const DropoutParams& p,
                                          const Keeper<Accumulate<T>>& keeper, int64_t tile) {
  constexpr int kWidth = kVectorWidth<T>;
  constexpr int kVectors = kElements<T> / kWidth;
  const Share<kElements<T>, kWidth, kAccess> share(threadIdx.x, kThreads, p.size - tile);
  Vector<T, kWidth> x[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k)
    load<Reuse::kNever>(static_cast<const T*>(p.x) + tile, share, k, &x[k]);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    Accumulate<T> v[kWidth], keep[kWidth];
    widen(x[k], v);
    if constexpr (kAccess == Access::kElement) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) keep[j] = keep_scale(keeper, tile + share.position(k, j));
    } else {
      keep_scales(keeper, tile + share.position(k), keep);
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) v[j] = v[j] * keep[j];
    store(v, static_cast<T*>(p.y) + tile, share, k);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) dropout_kernel(DropoutParams p, bool aligned) {
  if (p.state != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
    p.state[0] = static_cast<int64_t>(p.rule.seed);
    p.state[1] = static_cast<int64_t>(p.rule.offset);
  }
  const auto keeper = make_keeper<Accumulate<T>>(p.rule);
  for (int64_t tile = blockIdx.x * kTile<T>; tile < p.size; tile += gridDim.x * kTile<T>) {
    const int64_t left = p.size - tile;
    if (left < kTile<T> && left % kVectorWidth<T> != 0) {
      drop_tile<T, Access::kElement>(p, keeper, tile);
    } else if (aligned) {
      drop_tile<T, Access::kVector>(p, keeper, tile);
    } else {
      drop_tile<T, Access::kSplitVector>(p, keeper, tile);
    }
  }
}

}  // namespace

cudaError_t dropout(const DropoutParams& p, cudaStream_t stream) {
  if (p.size == 0 && p.state == nullptr) return cudaSuccess;
  DeviceLimits limits;
  const cudaError_t error = current_device_limits(&limits);
  if (error != cudaSuccess) return error;
  const bool aligned = is_aligned(p.x) && is_aligned(p.y);
  return dispatch(p.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    const int64_t tiles = p.size == 0 ? 1 : ceil_div(p.size, kTile<T>);
    return launch(dropout_kernel<T>, dim3(strided_grid(tiles, limits)), dim3(kThreads), 0, stream,
                  p, aligned);
  });
}

}  // namespace memopt::kernels::cuda
