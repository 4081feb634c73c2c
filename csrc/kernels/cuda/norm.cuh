// What the norms' forward and backward row kernels share: how a row is dealt out to threads,
// parameter loads, and what moments are summed from.
#pragma once

#include "../norm.h"
#include "keep_scales.cuh"
#include "launch.cuh"
#include "reduce.cuh"
#include "vec.cuh"

namespace memopt::kernels::cuda {

// Rows of up to kMaxRowThreads x kElements elements stay in registers: as few threads as hold the
// row share it, a power of two inside a warp and whole warps beyond, and short rows share a block
// of about `block_threads`. Depends on cols and the element type alone, and so does the order of
// every sum over a row.
constexpr int kMaxRowThreads = 512;

template <int kElements>
constexpr bool row_fits_registers(int64_t cols) {
  return cols <= int64_t{kMaxRowThreads} * kElements;
}

template <int kElements>
dim3 row_block(int64_t cols, int block_threads) {
  const int needed = static_cast<int>(ceil_div(cols, kElements));
  int threads = static_cast<int>(ceil_div(needed, kWarp)) * kWarp;
  if (needed < kWarp) {
    threads = 1;
    while (threads < needed) threads *= 2;
  }
  const int rows = block_threads / threads;
  return dim3(threads, rows > 1 ? rows : 1);
}

// A norm with what stands in front of it.
template <class Norm, bool kAddsResidual, bool kDropsInput>
struct InFront : Norm {
  static constexpr bool kAdds = kAddsResidual;
  // With kAdds: x is multiplied by dropout's keep scales before it is added.
  static constexpr bool kDrops = kDropsInput;
};

// f(InFront<...>{}) with the norm that p names.
template <class Params, class F>
cudaError_t dispatch_norm(const Params& p, bool adds, bool drops, F&& f) {
  if (!is_norm(p.kind, p.activation.kind, adds || drops)) return cudaErrorInvalidValue;
  return with_norm(p, [&](auto norm) {
    using N = decltype(norm);
    if constexpr (!N::kActivates) {
      if (drops) return f(InFront<N, true, true>{});
      if (adds) return f(InFront<N, true, false>{});
    }
    return f(InFront<N, false, false>{});
  });
}

// Vector k of a share of the tile that begins at column `tile` of gamma or beta; a null pointer
// stands for `otherwise` everywhere.
template <class G, int kElements, int kWidth, Access kAccess, class A>
__device__ __forceinline__ void load_param(const void* param, A otherwise, int64_t tile,
                                           const Share<kElements, kWidth, kAccess>& share, int k,
                                           A (&out)[kWidth]) {
  if (param != nullptr) {
    load<Load::kPlain>(static_cast<const G*>(param) + tile, share, k, out);
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) out[j] = otherwise;
  }
}

// The same of the scale, made from gamma.
template <class Norm, class G, class Params, int kElements, int kWidth, Access kAccess, class A>
__device__ __forceinline__ void load_scale(const Params& p, int64_t tile,
                                           const Share<kElements, kWidth, kAccess>& share, int k,
                                           A (&out)[kWidth]) {
  load_param<G>(p.gamma, A(1), tile, share, k, out);
  const A offset = static_cast<A>(scale_offset(p));
#pragma unroll
  for (int j = 0; j < kWidth; ++j) out[j] = Norm::Statistics::scale(out[j], offset);
}

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

}  // namespace memopt::kernels::cuda
