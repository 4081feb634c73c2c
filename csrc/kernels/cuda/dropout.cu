// Dropout, forward and backward alike.
//
// Memory: reads x, writes y (over x if asked): 4 bytes an element in 2-byte types, each moved once
// by 16-byte vectors. A vector of 8 takes one Philox call, about 60 instructions of which 20 are
// wide multiplications; a vector of 4 floats takes one too, and has twice the time to hide it in.
// Where the arrays are not aligned a thread keeps its vectors and moves them element by element;
// only in a last tile that ends inside a vector does each element take a call of its own.
#include "../dropout.h"

#include "elementwise.cuh"
#include "keep_scales.cuh"
#include "launchers.h"

namespace memopt::kernels::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(kElementwiseThreads)
    dropout_kernel(DropoutParams p, bool aligned) {
  constexpr int kWidth = kVectorWidth<T>;
  constexpr int kVectors = kTileElements<T> / kWidth;
  leave_state(p.rule, p.state);
  const auto keeper = make_keeper<Accumulate<T>>(p.rule);
  with_tile<T, Access::kSplitVector>(p.size, aligned, [&](int64_t tile, const auto& share) {
    Vector<T, kWidth> x[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      load<Load::kPlain>(static_cast<const T*>(p.x) + tile, share, k, &x[k]);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      Accumulate<T> v[kWidth], keep[kWidth];
      widen(x[k], v);
      load_keep_scales(keeper, tile, share, k, keep);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v[j] = v[j] * keep[j];
      store(v, static_cast<T*>(p.y) + tile, share, k);
    }
  });
}

}  // namespace

cudaError_t dropout(const DropoutParams& p, cudaStream_t stream) {
  if (p.size == 0 && p.state == nullptr) return cudaSuccess;
  const bool aligned = is_aligned(p.x) && is_aligned(p.y);
  return launch_tiles(p.dtype, p.size, p, aligned, stream,
                      [](auto t) { return dropout_kernel<typename decltype(t)::type>; });
}

}  // namespace memopt::kernels::cuda
