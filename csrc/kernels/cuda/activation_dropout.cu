// Activations with dropout behind them, element by element.
//
// Memory: as activation.cu, 4, 6 and 8 bytes an element in 2-byte types, each moved once by 16-byte
// vectors: no mask, and nothing between the two. A vector of 8 takes one Philox call, about 8
// instructions an element more than the activation alone: forward of GELU in 2-byte types is then
// bound by them and no longer by memory. Tiles that are not aligned, and a last one that ends
// inside a vector, move as in dropout.cu.
#include "../activation_dropout.h"

#include "elementwise.cuh"
#include "keep_scales.cuh"
#include "launchers.h"

namespace memopt::kernels::cuda {
namespace {

template <class T, class Function>
__global__ void __launch_bounds__(kElementwiseThreads)
    activation_dropout_forward_kernel(ActivationDropoutForwardParams p, bool aligned) {
  constexpr int kWidth = kVectorWidth<T>;
  constexpr int kVectors = kTileElements<T> / kWidth;
  const ActivationForwardParams& a = p.activation;
  leave_state(p.rule, p.state);
  const auto keeper = make_keeper<Accumulate<T>>(p.rule);
  for_each_tile<T, Access::kSplitVector>(a.size, aligned, [&](int64_t tile, const auto& share) {
    Vector<T, kWidth> x[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      load<Reuse::kNever>(static_cast<const T*>(a.x) + tile, share, k, &x[k]);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      Accumulate<T> v[kWidth], keep[kWidth];
      widen(x[k], v);
      load_keep_scales(keeper, tile, share, k, keep);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v[j] = Function::value(v[j]) * keep[j];
      store(v, static_cast<T*>(a.y) + tile, share, k);
    }
  });
}

template <class T, class Function>
__global__ void __launch_bounds__(kElementwiseThreads)
    activation_dropout_backward_kernel(ActivationDropoutBackwardParams p, bool aligned) {
  constexpr int kWidth = kVectorWidth<T>;
  constexpr int kVectors = kTileElements<T> / kWidth;
  const ActivationBackwardParams& a = p.activation;
  const auto keeper = make_keeper<Accumulate<T>>(p.rule);
  for_each_tile<T, Access::kSplitVector>(a.size, aligned, [&](int64_t tile, const auto& share) {
    Vector<T, kWidth> x[kVectors], dy[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      load<Reuse::kNever>(static_cast<const T*>(a.x) + tile, share, k, &x[k]);
      load<Reuse::kNever>(static_cast<const T*>(a.dy) + tile, share, k, &dy[k]);
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      Accumulate<T> v[kWidth], grad[kWidth], keep[kWidth];
      widen(x[k], v);
      widen(dy[k], grad);
      load_keep_scales(keeper, tile, share, k, keep);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const auto f = Function::value_and_grad(v[j]);
        grad[j] = chain<Function>(grad[j] * keep[j], f.grad);
        v[j] = f.value * keep[j];
      }
      store(grad, static_cast<T*>(a.dx) + tile, share, k);
      if (a.y != nullptr) store(v, static_cast<T*>(a.y) + tile, share, k);
    }
  });
}

}  // namespace

cudaError_t activation_dropout_forward(const ActivationDropoutForwardParams& p,
                                       cudaStream_t stream) {
  const ActivationForwardParams& a = p.activation;
  if (a.size == 0 && p.state == nullptr) return cudaSuccess;
  const bool aligned = is_aligned(a.x) && is_aligned(a.y);
  return launch_tiles(a.dtype, a.size, p, aligned, stream, [&](auto t) {
    return with_activation(a.activation, [&](auto f) {
      return activation_dropout_forward_kernel<typename decltype(t)::type, decltype(f)>;
    });
  });
}

cudaError_t activation_dropout_backward(const ActivationDropoutBackwardParams& p,
                                        cudaStream_t stream) {
  const ActivationBackwardParams& a = p.activation;
  if (a.size == 0) return cudaSuccess;
  const bool aligned = is_aligned(a.dy) && is_aligned(a.x) && is_aligned(a.dx) && is_aligned(a.y);
  return launch_tiles(a.dtype, a.size, p, aligned, stream, [&](auto t) {
    return with_activation(a.activation, [&](auto f) {
      return activation_dropout_backward_kernel<typename decltype(t)::type, decltype(f)>;
    });
  });
}

}  // namespace memopt::kernels::cuda
