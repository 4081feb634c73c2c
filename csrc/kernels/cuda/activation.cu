// Activations and their derivatives, element by element.
//
// Memory: forward reads x and writes y; backward reads dy and x, writes dx (in place over dy if
// asked) and, if asked, f(x) again: 4, 6 and 8 bytes an element in 2-byte types, each moved
// once, by 16-byte vectors, all vectors of a tile in flight before the first is used. For 4
// bytes an H200 has the time of 27 instructions, for 6 bytes of 41: GELU forward takes 20 an
// element (12 in the tanh form), backward 24 (20), and the others less.
#include "../activation.h"

#include "elementwise.cuh"
#include "launchers.h"

namespace memopt::kernels::cuda {
namespace {

template <class T, class Function>
__global__ void __launch_bounds__(kElementwiseThreads)
    activation_forward_kernel(ActivationForwardParams p, bool aligned) {
  constexpr int kWidth = kVectorWidth<T>;
  constexpr int kVectors = kTileElements<T> / kWidth;
  for_each_tile<T, Access::kElement>(p.size, aligned, [&](int64_t tile, const auto& share) {
    Vector<T, kWidth> x[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      load<Reuse::kNever>(static_cast<const T*>(p.x) + tile, share, k, &x[k]);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      Accumulate<T> v[kWidth];
      widen(x[k], v);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v[j] = Function::value(v[j]);
      store(v, static_cast<T*>(p.y) + tile, share, k);
    }
  });
}

template <class T, class Function>
__global__ void __launch_bounds__(kElementwiseThreads)
    activation_backward_kernel(ActivationBackwardParams p, bool aligned) {
  constexpr int kWidth = kVectorWidth<T>;
  constexpr int kVectors = kTileElements<T> / kWidth;
  for_each_tile<T, Access::kElement>(p.size, aligned, [&](int64_t tile, const auto& share) {
    Vector<T, kWidth> x[kVectors], dy[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      load<Reuse::kNever>(static_cast<const T*>(p.x) + tile, share, k, &x[k]);
      load<Reuse::kNever>(static_cast<const T*>(p.dy) + tile, share, k, &dy[k]);
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      Accumulate<T> v[kWidth], grad[kWidth];
      widen(x[k], v);
      widen(dy[k], grad);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const auto f = Function::value_and_grad(v[j]);
        grad[j] = chain<Function>(grad[j], f.grad);
        v[j] = f.value;
      }
      store(grad, static_cast<T*>(p.dx) + tile, share, k);
      if (p.y != nullptr) store(v, static_cast<T*>(p.y) + tile, share, k);
    }
  });
}

// Launches one of the kernels above, which pick(Type<T>{}, Silu{}, say) picks.
template <class Params, class Pick>
cudaError_t launch_elementwise(const Params& p, bool aligned, cudaStream_t stream, Pick&& pick) {
  if (p.size == 0) return cudaSuccess;
  return launch_tiles(p.dtype, p.size, p, aligned, stream, [&](auto t) {
    return with_activation(p.activation, [&](auto f) { return pick(t, f); });
  });
}

}  // namespace

cudaError_t activation_forward(const ActivationForwardParams& p, cudaStream_t stream) {
  const bool aligned = is_aligned(p.x) && is_aligned(p.y);
  return launch_elementwise(p, aligned, stream, [](auto t, auto f) {
    return activation_forward_kernel<typename decltype(t)::type, decltype(f)>;
  });
}

cudaError_t activation_backward(const ActivationBackwardParams& p, cudaStream_t stream) {
  const bool aligned = is_aligned(p.dy) && is_aligned(p.x) && is_aligned(p.dx) && is_aligned(p.y);
  return launch_elementwise(p, aligned, stream, [](auto t, auto f) {
    return activation_backward_kernel<typename decltype(t)::type, decltype(f)>;
  });
}

}  // namespace memopt::kernels::cuda
