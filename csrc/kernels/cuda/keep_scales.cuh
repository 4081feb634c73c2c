// Dropout inside of a kernel that deals its tiles out by shares (vec.cuh).
#pragma once

#include "../dropout.h"
#include "vec.cuh"

namespace memopt::kernels::cuda {

// What vector k of a share of a tile is multiplied by. first: the index of the tile's first
// element, a multiple of kWidth where the share is of vectors; they take one Philox call for 8
// neighbours (4 in float32, 2 in float64), single elements one each.
template <int kElements, int kWidth, Access kAccess, class A>
__device__ __forceinline__ void load_keep_scales(const Keeper<A>& keeper, int64_t first,
                                                 const Share<kElements, kWidth, kAccess>& share,
                                                 int k, A (&keep)[kWidth]) {
  if constexpr (kAccess == Access::kElement) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      keep[j] = keep_scale(keeper, static_cast<uint64_t>(first + share.position(k, j)));
  } else {
    keep_scales(keeper, static_cast<uint64_t>(first + share.position(k)), keep);
  }
}

// Leaves the state of forward's numbers where backward will read it; null: nowhere.
__device__ __forceinline__ void leave_state(const DropoutRule& rule, int64_t* state) {
  if (state == nullptr || blockIdx.x != 0 || threadIdx.x != 0 || threadIdx.y != 0) return;
  state[0] = static_cast<int64_t>(rule.seed);
  state[1] = static_cast<int64_t>(rule.offset);
}

}  // namespace memopt::kernels::cuda
