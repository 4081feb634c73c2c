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

// Calls f(tile's first element, the thread's share of the tile) for the block's tile. It moves by
// vectors, or as kUnaligned says where an array is not aligned; a last one that ends inside a
// vector moves by elements. One tile to a block: blocks that went on to further ones took 2 %
// longer on an H100.
template <class T, Access kUnaligned, class F>
__device__ __forceinline__ void with_tile(int64_t size, bool aligned, F&& f) {
  constexpr int kWidth = kVectorWidth<T>;
  const int64_t tile = blockIdx.x * kTile<T>;
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

// Launches pick(Type<T>{}), a kernel that takes p and `aligned`, over the tiles of an array.
template <class Params, class Pick>
cudaError_t launch_tiles(ScalarType dtype, int64_t size, const Params& p, bool aligned,
                         cudaStream_t stream, Pick&& pick) {
  return dispatch(dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    const int64_t tiles = size == 0 ? 1 : ceil_div(size, kTile<T>);
    return launch(pick(t), dim3(static_cast<unsigned>(tiles)), dim3(kElementwiseThreads), 0, stream,
                  p, aligned);
  });
}

}  // namespace memopt::kernels::cuda
