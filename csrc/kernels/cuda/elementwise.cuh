// What the elementwise kernels share: how a contiguous array is cut into tiles, and their launch.
#pragma once

#include "launch.cuh"
#include "vec.cuh"

namespace memopt::kernels::cuda {

constexpr int kElementwiseThreads = 256;

// Of a thread, of each array.
template <class T>
constexpr int kTileElements = sizeof(T) == 8 ? 4 : 16;

template <class T>
constexpr int64_t kTile = kElementwiseThreads * kTileElements<T>;

// Calls f(tile's first element, the thread's share of the tile) for every tile of the block. Tiles
// move by vectors, or as kUnaligned says where an array is not aligned; a last one that ends inside
// a vector moves by elements.
template <class T, Access kUnaligned, class F>
__device__ __forceinline__ void for_each_tile(int64_t size, bool aligned, F&& f) {
  constexpr int kWidth = kVectorWidth<T>;
  for (int64_t tile = blockIdx.x * kTile<T>; tile < size; tile += gridDim.x * kTile<T>) {
    const int64_t left = size - tile;
    const auto share = [&](auto access) {
      return Share<kTileElements<T>, kWidth, decltype(access)::value>(threadIdx.x,
                                                                      kElementwiseThreads, left);
    };
    const bool whole_vectors = left >= kTile<T> || left % kWidth == 0;
    if (aligned && whole_vectors) {
      f(tile, share(AccessConstant<Access::kVector>{}));
    } else if (kUnaligned == Access::kElement || !whole_vectors) {
      f(tile, share(AccessConstant<Access::kElement>{}));
    } else {
      f(tile, share(AccessConstant<kUnaligned>{}));
    }
  }
}

// Launches pick(Type<T>{}), a kernel that takes p and `aligned`, over the tiles of an array.
template <class Params, class Pick>
cudaError_t launch_tiles(ScalarType dtype, int64_t size, const Params& p, bool aligned,
                         cudaStream_t stream, Pick&& pick) {
  DeviceLimits limits;
  const cudaError_t error = current_device_limits(&limits);
  if (error != cudaSuccess) return error;
  return dispatch(dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    const int64_t tiles = size == 0 ? 1 : ceil_div(size, kTile<T>);
    return launch(pick(t), dim3(strided_grid(tiles, limits)), dim3(kElementwiseThreads), 0, stream,
                  p, aligned);
  });
}

}  // namespace memopt::kernels::cuda
