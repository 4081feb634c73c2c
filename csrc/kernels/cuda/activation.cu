// Activations and their derivatives, element by element.
//
// Memory: forward reads x and writes y; backward reads dy and x, writes dx (in place over dy if
// asked) and, if asked, f(x) again: 4, 6 and 8 bytes an element in 2-byte types, each moved
// once, by 16-byte vectors, all vectors of a tile in flight before the first is used. For 4
// bytes an H200 has the time of 27 instructions, for 6 bytes of 41: GELU forward takes 20 an
// element (12 in the tanh form), backward 24 (20), and the others less.
//
// With dropout behind them no mask moves, and nothing between the two. A vector of 8 takes one
// Philox call, about 8 instructions an element more: forward of GELU in 2-byte types is then bound
// by them and no longer by memory. Tiles that are not aligned, and a last one that ends inside a
// vector, move as in dropout.cu.
#include "../activation.h"

#include "elementwise.cuh"
#include "keep_scales.cuh"
#include "launchers.h"

namespace memopt::kernels::cuda {
namespace {

template <bool kDrops>
constexpr Access kUnaligned = kDrops ? Access::kSplitVector : Access::kElement;

template <class T, class Function, bool kDrops>
__global__ void __launch_bounds__(kElementwiseThreads)
    activation_forward_kernel(ActivationForwardParams p, bool aligned) {
  constexpr int kWidth = kVectorWidth<T>;
  constexpr int kVectors = kTileElements<T> / kWidth;
  if constexpr (kDrops) leave_state(p.rule, p.state);
  const auto f = make_activation<Function>(p.activation);
  [[maybe_unused]] const auto keeper = make_keeper<Accumulate<T>>(p.rule);
  with_tile<T, kUnaligned<kDrops>>(p.size, aligned, [&](int64_t tile, const auto& share) {
    Vector<T, kWidth> x[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      load<Load::kPlain>(static_cast<const T*>(p.x) + tile, share, k, &x[k]);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      Accumulate<T> v[kWidth];
      widen(x[k], v);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v[j] = f.value(v[j]);
      if constexpr (kDrops) {
        Accumulate<T> keep[kWidth];
        load_keep_scales(keeper, tile, share, k, keep);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) v[j] = v[j] * keep[j];
      }
      store(v, static_cast<T*>(p.y) + tile, share, k);
    }
  });
}

template <class T, class Function, bool kDrops>
__global__ void __launch_bounds__(kElementwiseThreads)
    activation_backward_kernel(ActivationBackwardParams p, bool aligned) {
  constexpr int kWidth = kVectorWidth<T>;
  constexpr int kVectors = kTileElements<T> / kWidth;
  const auto f = make_activation<Function>(p.activation);
  [[maybe_unused]] const auto keeper = make_keeper<Accumulate<T>>(p.rule);
  with_tile<T, kUnaligned<kDrops>>(p.size, aligned, [&](int64_t tile, const auto& share) {
    Vector<T, kWidth> x[kVectors], dy[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      load<Load::kPlain>(static_cast<const T*>(p.x) + tile, share, k, &x[k]);
      load<Load::kPlain>(static_cast<const T*>(p.dy) + tile, share, k, &dy[k]);
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      Accumulate<T> v[kWidth], grad[kWidth];
      widen(x[k], v);
      widen(dy[k], grad);
      [[maybe_unused]] Accumulate<T> keep[kWidth];
      if constexpr (kDrops) load_keep_scales(keeper, tile, share, k, keep);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const auto at_x = f.value_and_grad(v[j]);
        if constexpr (kDrops) {
          grad[j] = chain<Function>(grad[j] * keep[j], at_x.grad);
          v[j] = at_x.value * keep[j];
        } else {
          grad[j] = chain<Function>(grad[j], at_x.grad);
          v[j] = at_x.value;
        }
      }
      store(grad, static_cast<T*>(p.dx) + tile, share, k);
      if (p.y != nullptr) store(v, static_cast<T*>(p.y) + tile, share, k);
    }
  });
}

// Launches one of the kernels above, which pick(Type<T>{}, Silu{}, drops), say, picks.
template <class Params, class Pick>
cudaError_t launch_elementwise(const Params& p, bool aligned, cudaStream_t stream, Pick&& pick) {
  return launch_tiles(p.dtype, p.size, p, aligned, stream, [&](auto t) {
    return with_activation(p.activation, [&](auto f) {
      return p.drops ? pick(t, f, std::true_type{}) : pick(t, f, std::false_type{});
    });
  });
}

}  // namespace

cudaError_t activation_forward(const ActivationForwardParams& p, cudaStream_t stream) {
  const bool leaves_state = p.drops && p.state != nullptr;
  if (p.size == 0 && !leaves_state) return cudaSuccess;
  const bool aligned = is_aligned(p.x) && is_aligned(p.y);
  return launch_elementwise(p, aligned, stream, [](auto t, auto f, auto drops) {
    return activation_forward_kernel<typename decltype(t)::type, decltype(f), drops.value>;
  });
}

cudaError_t activation_backward(const ActivationBackwardParams& p, cudaStream_t stream) {
  if (p.size == 0) return cudaSuccess;
  const bool aligned = is_aligned(p.dy) && is_aligned(p.x) && is_aligned(p.dx) && is_aligned(p.y);
  return launch_elementwise(p, aligned, stream, [](auto t, auto f, auto drops) {
    return activation_backward_kernel<typename decltype(t)::type, decltype(f), drops.value>;
  });
}

}  // namespace memopt::kernels::cuda
