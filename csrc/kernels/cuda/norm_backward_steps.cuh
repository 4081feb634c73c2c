// Backward of the norms (formulas: kernels/norm.h): the plan, and the steps that backward_rows and
// backward_long are made of.
//
// Memory: x and dy are read once, dx is written once (over dy if asked), and y once if it is
// re-emitted: 6 or 8 bytes an element in 2-byte types, and 2 more each for the sum's own gradient
// and for dx_dropped, whose mask is drawn again. The weight gradients come from the same pass: the
// grid is persistent, a thread owns the same columns of every row that it meets and sums their
// gradients; at its end each block (a "part") writes one row of partial sums, and
// norm_reduce_parts() adds the parts in order. The sums, and a row between its two uses, are
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
#include "norm.cuh"

namespace memopt::kernels::cuda {

template <class T, Access kAccess>
constexpr int kBackwardElements = (kAccess == Access::kElement ? 16 : 32) / sizeof(T);

constexpr int kBackwardBlockThreads = 256;  // for rows shorter than that
constexpr int kBackwardThreadsPerMultiprocessor = 512;
template <class T>  // erfc() in float64 takes more than the 64 registers of 1024 threads
constexpr int kLongBackwardThreads = sizeof(T) == 8 ? 512 : 1024;

// Adds the parts' sums in p.partials, in order, into p.dgamma and, if there are two to a part,
// p.dbeta.
cudaError_t norm_reduce_parts(const NormBackwardParams& p, int weight_grads, cudaStream_t stream);

template <class Norm, class A>
__device__ __forceinline__ Moments<A> row_stats(const NormBackwardParams& p, int64_t row) {
  const A mean = Norm::kCentred ? static_cast<const A*>(p.mean)[row] : A(0);
  return {mean, static_cast<const A*>(p.rstd)[row]};
}

// The first step for vector k of a share of the tile that begins at column `tile`: xhat, g = dz
// gamma and dz. With `y` (the row's), re-emits y.
template <class Norm, class T, class G, int kElements, int kWidth, Access kAccess, class A>
__device__ __forceinline__ void differentiate(const NormBackwardParams& p,
                                              const Vector<T, kWidth>& x,
                                              const Vector<T, kWidth>& dy, Moments<A> stats, T* y,
                                              int64_t tile,
                                              const Share<kElements, kWidth, kAccess>& share, int k,
                                              A (&xhat)[kWidth], A (&g)[kWidth], A (&dz)[kWidth]) {
  using S = typename Norm::Statistics;
  const auto f = make_activation<typename Norm::Activation>(p.activation);
  A gamma[kWidth], beta[kWidth], value[kWidth];
  const bool needs_beta = Norm::kCentred && (Norm::kActivates || y != nullptr);
  load_scale<Norm, G>(p, tile, share, k, gamma);
  load_param<G>(needs_beta ? p.beta : nullptr, A(0), tile, share, k, beta);
  widen(x, xhat);
  widen(dy, dz);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    xhat[j] = S::normalize(xhat[j], stats.mean, stats.rstd);
    const ValueGrad<A> act = f.value_and_grad(S::affine(xhat[j], gamma[j], beta[j]));
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

// The sums of a row over its threads; RMSNorm needs the second alone.
template <class Norm, class A>
__device__ __forceinline__ Pair<A> row_means(Pair<A> sums, int set, A inverse_cols) {
  if constexpr (Norm::kCentred) {
    sums = row_sum(sums, set);
    return {sums.first * inverse_cols, sums.second * inverse_cols};
  } else {
    return {0, row_sum(sums.second, set) * inverse_cols};
  }
}

// Whether there is a gradient of the sum's own.
template <class Norm>
__device__ __forceinline__ bool has_dsum(const NormBackwardParams& p) {
  return Norm::kAdds && (!Norm::kDrops || p.dsum != nullptr);
}

// Whether anything is wanted that comes of the second step.
template <class Norm>
MEMOPT_HD bool wants_input_grad(const NormBackwardParams& p) {
  return p.dx != nullptr || (Norm::kDrops && p.dx_dropped != nullptr);
}

// Vector k of the sum's own gradient, if there is one.
template <class Norm, class T, int kElements, int kWidth, Access kAccess>
__device__ __forceinline__ void load_dsum(const NormBackwardParams& p, int64_t row, int64_t tile,
                                          const Share<kElements, kWidth, kAccess>& share, int k,
                                          Vector<T, kWidth>* dsum) {
  if constexpr (Norm::kAdds) {
    if (!has_dsum<Norm>(p)) return;
    load<Load::kEvictFirst>(static_cast<const T*>(p.dsum) + row * p.dsum_row_stride + tile, share,
                            k, dsum);
  }
}

// The second step, with the row's means at hand.
template <class Norm, class T, int kElements, int kWidth, Access kAccess, class A>
__device__ __forceinline__ void write_input_grad(const NormBackwardParams& p, const A (&g)[kWidth],
                                                 const A (&xhat)[kWidth],
                                                 const Vector<T, kWidth>& dsum, Pair<A> means,
                                                 A rstd, int64_t row, int64_t tile,
                                                 const Share<kElements, kWidth, kAccess>& share,
                                                 int k) {
  A dx[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j)
    dx[j] = Norm::Statistics::input_grad(g[j], xhat[j], means.first, means.second, rstd);
  if (has_dsum<Norm>(p)) {
    A own[kWidth];
    widen(dsum, own);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) dx[j] += own[j];
  }
  if (!Norm::kDrops || p.dx != nullptr)
    store(dx, static_cast<T*>(p.dx) + row * p.cols + tile, share, k);
  if constexpr (Norm::kDrops) {
    if (p.dx_dropped == nullptr) return;
    const auto keeper = make_keeper<A>(p.rule);  // here: see load_first()
    A keep[kWidth];
    load_keep_scales(keeper, row * p.cols + tile, share, k, keep);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) dx[j] = dx[j] * keep[j];
    store(dx, static_cast<T*>(p.dx_dropped) + row * p.cols + tile, share, k);
  }
}

}  // namespace memopt::kernels::cuda
