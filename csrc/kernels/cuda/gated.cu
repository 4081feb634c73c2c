// Gated units and their gradients, element by element over rows with strides.
//
// Memory: forward reads gate and up and writes y, 6 bytes an element of y in 2-byte types; backward
// reads dy, gate and up and writes dgate and dup, 10, and 12 if it writes y again; each moved once,
// by 16-byte vectors where rows are aligned, all of a thread's vectors in flight before the first
// is used. Where gate and up alternate in one array a thread takes the 32 bytes that hold its 16 of
// each.
#include "../gated.h"

#include "launch.cuh"
#include "launchers.h"
#include "vec.cuh"

namespace memopt::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVectors = 2;  // of each array, a thread

template <class T>
constexpr int kElements = kVectors * kVectorWidth<T>;

// Calls f(row, first column, the thread's share of the columns from there on) for the block's tile:
// blockDim.y rows of blockDim.x threads each.
template <class T, class F>
__device__ __forceinline__ void with_tile(int64_t rows, int64_t cols, bool aligned, F&& f) {
  constexpr int kWidth = kVectorWidth<T>;
  const unsigned tile_cols = kElements<T> * blockDim.x;
  const unsigned tiles_per_row = static_cast<unsigned>(ceil_div(cols, tile_cols));
  const int64_t row = int64_t{blockIdx.x / tiles_per_row} * blockDim.y + threadIdx.y;
  const int64_t col = int64_t{blockIdx.x % tiles_per_row} * tile_cols;
  if (row >= rows) return;
  const int64_t left = cols - col;
  if (aligned && (left >= tile_cols || left % kWidth == 0)) {
    f(row, col, Share<kElements<T>, kWidth, Access::kVector>(threadIdx.x, blockDim.x, left));
  } else {
    f(row, col, Share<kElements<T>, kWidth, Access::kElement>(threadIdx.x, blockDim.x, left));
  }
}

// Where gate and up alternate: the share's elements of both, vector k, from a tile at p, which
// holds 2 left elements.
template <class T, int kWidth, Access kAccess>
__device__ __forceinline__ void load_pairs(const T* p, int64_t left,
                                           const Share<kElements<T>, kWidth, kAccess>& share, int k,
                                           Vector<T, kWidth>* gate, Vector<T, kWidth>* up) {
  T pairs[2 * kWidth] = {};
  if constexpr (kAccess == Access::kVector) {
    const Share<2 * kElements<T>, 2 * kWidth, kAccess> both(share.thread, share.threads, 2 * left);
    Vector<T, 2 * kWidth> v;
    load<Load::kPlain>(p, both, k, &v);
    memcpy(pairs, v.words, sizeof(pairs));
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (!share.owns(k, j)) continue;
      pairs[2 * j] = p[2 * share.position(k, j)];
      pairs[2 * j + 1] = p[2 * share.position(k, j) + 1];
    }
  }
  T gates[kWidth], ups[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    gates[j] = pairs[2 * j];
    ups[j] = pairs[2 * j + 1];
  }
  memcpy(gate->words, gates, sizeof(gates));
  memcpy(up->words, ups, sizeof(ups));
}

template <class T, int kWidth, Access kAccess, class A>
__device__ __forceinline__ void store_pairs(const A (&gate)[kWidth], const A (&up)[kWidth], T* p,
                                            int64_t left,
                                            const Share<kElements<T>, kWidth, kAccess>& share,
                                            int k) {
  A pairs[2 * kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    pairs[2 * j] = gate[j];
    pairs[2 * j + 1] = up[j];
  }
  if constexpr (kAccess == Access::kVector) {
    const Share<2 * kElements<T>, 2 * kWidth, kAccess> both(share.thread, share.threads, 2 * left);
    store(pairs, p, both, k);
  } else {
    Vector<T, 2 * kWidth> v;
    narrow(pairs, &v);
    T out[2 * kWidth];
    memcpy(out, v.words, sizeof(out));
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (!share.owns(k, j)) continue;
      p[2 * share.position(k, j)] = out[2 * j];
      p[2 * share.position(k, j) + 1] = out[2 * j + 1];
    }
  }
}

template <class T, class Function, bool kInterleaved>
__global__ void __launch_bounds__(kThreads)
    gated_forward_kernel(GatedForwardParams p, bool aligned) {
  constexpr int kWidth = kVectorWidth<T>;
  constexpr int kApart = kInterleaved ? 2 : 1;
  const auto f = make_activation<Function>(p.activation);
  with_tile<T>(p.rows, p.cols, aligned, [&](int64_t row, int64_t col, const auto& share) {
    const T* gate = static_cast<const T*>(p.gate) + row * p.gate_row_stride + kApart * col;
    [[maybe_unused]] const T* up =
        static_cast<const T*>(p.up) + row * p.up_row_stride + kApart * col;
    Vector<T, kWidth> gates[kVectors], ups[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if constexpr (kInterleaved) {
        load_pairs(gate, p.cols - col, share, k, &gates[k], &ups[k]);
      } else {
        load<Load::kPlain>(gate, share, k, &gates[k]);
        load<Load::kPlain>(up, share, k, &ups[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      Accumulate<T> g[kWidth], u[kWidth];
      widen(gates[k], g);
      widen(ups[k], u);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) g[j] = gated_value(f, g[j], u[j]);
      store(g, static_cast<T*>(p.y) + row * p.cols + col, share, k);
    }
  });
}

template <class T, class Function, bool kInterleaved>
__global__ void __launch_bounds__(kThreads)
    gated_backward_kernel(GatedBackwardParams p, bool aligned) {
  constexpr int kWidth = kVectorWidth<T>;
  constexpr int kApart = kInterleaved ? 2 : 1;
  const auto f = make_activation<Function>(p.activation);
  with_tile<T>(p.rows, p.cols, aligned, [&](int64_t row, int64_t col, const auto& share) {
    const T* dy = static_cast<const T*>(p.dy) + row * p.dy_row_stride + col;
    const T* gate = static_cast<const T*>(p.gate) + row * p.gate_row_stride + kApart * col;
    [[maybe_unused]] const T* up =
        static_cast<const T*>(p.up) + row * p.up_row_stride + kApart * col;
    const int64_t gradient = row * p.grad_row_stride + kApart * col;
    Vector<T, kWidth> gates[kVectors], ups[kVectors], dys[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      load<Load::kPlain>(dy, share, k, &dys[k]);
      if constexpr (kInterleaved) {
        load_pairs(gate, p.cols - col, share, k, &gates[k], &ups[k]);
      } else {
        load<Load::kPlain>(gate, share, k, &gates[k]);
        ups[k] = {};
        if (p.up != nullptr) load<Load::kPlain>(up, share, k, &ups[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      Accumulate<T> d[kWidth], g[kWidth], u[kWidth];
      widen(dys[k], d);
      widen(gates[k], g);
      widen(ups[k], u);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const auto results = gated_grad(f, d[j], g[j], u[j]);
        g[j] = results.dgate;
        u[j] = results.dup;
        d[j] = results.y;
      }
      if constexpr (kInterleaved) {
        store_pairs(g, u, static_cast<T*>(p.dgate) + gradient, p.cols - col, share, k);
      } else {
        if (p.dgate != nullptr) store(g, static_cast<T*>(p.dgate) + gradient, share, k);
        if (p.dup != nullptr) store(u, static_cast<T*>(p.dup) + gradient, share, k);
      }
      if (p.y != nullptr) store(d, static_cast<T*>(p.y) + row * p.cols + col, share, k);
    }
  });
}

// Launches one of the kernels above, which pick(Type<T>{}, Silu{}, bool constant) picks. A row gets
// as many threads as it has vectors for, a power of two of them; a block as many rows as fit.
template <class Params, class Pick>
cudaError_t launch_rows(const Params& p, bool aligned, cudaStream_t stream, Pick&& pick) {
  if (p.rows == 0 || p.cols == 0) return cudaSuccess;
  return dispatch(p.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    unsigned threads = 1;
    while (threads < kThreads && threads * kElements<T> < p.cols) threads *= 2;
    const dim3 block(threads, kThreads / threads);
    const int64_t tiles =
        ceil_div(p.rows, block.y) * ceil_div(p.cols, int64_t{kElements<T>} * threads);
    const dim3 grid(static_cast<unsigned>(tiles));
    return with_activation(p.activation, [&](auto f) {
      const auto kernel =
          p.interleaved ? pick(t, f, std::true_type{}) : pick(t, f, std::false_type{});
      return launch(kernel, grid, block, 0, stream, p, aligned);
    });
  });
}

// Whether rows may move by 16-byte vectors: their beginnings and, for y, their ends.
bool all_aligned(ScalarType dtype, int64_t rows, std::initializer_list<const void*> pointers,
                 std::initializer_list<int64_t> strides) {
  const int64_t width = dtype == ScalarType::kDouble ? 2 : dtype == ScalarType::kFloat ? 4 : 8;
  for (const void* p : pointers) {
    if (!is_aligned(p)) return false;
  }
  for (const int64_t stride : strides) {
    if (rows > 1 && stride % width != 0) return false;
  }
  return true;
}

}  // namespace

cudaError_t gated_forward(const GatedForwardParams& p, cudaStream_t stream) {
  const bool aligned = all_aligned(p.dtype, p.rows, {p.gate, p.interleaved ? nullptr : p.up, p.y},
                                   {p.gate_row_stride, p.up_row_stride, p.cols});
  return launch_rows(p, aligned, stream, [](auto t, auto f, auto interleaved) {
    return gated_forward_kernel<typename decltype(t)::type, decltype(f), interleaved.value>;
  });
}

cudaError_t gated_backward(const GatedBackwardParams& p, cudaStream_t stream) {
  const bool aligned = all_aligned(
      p.dtype, p.rows,
      {p.dy, p.gate, p.interleaved ? nullptr : p.up, p.dgate, p.interleaved ? nullptr : p.dup, p.y},
      {p.dy_row_stride, p.gate_row_stride, p.up_row_stride, p.grad_row_stride, p.cols});
  return launch_rows(p, aligned, stream, [](auto t, auto f, auto interleaved) {
    return gated_backward_kernel<typename decltype(t)::type, decltype(f), interleaved.value>;
  });
}

}  // namespace memopt::kernels::cuda
