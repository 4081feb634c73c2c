// What every norm's backward shares: how many parts the weight gradients are summed in, and the
// kernel that adds the parts.
#include "launchers.h"
#include "norm_backward_steps.cuh"

namespace memopt::kernels::cuda {
namespace {

// Memory: reads partials [parts, gridDim.y, cols] once, a few per cent of backward's own traffic. A
// block takes 32 columns of dgamma (blockIdx.y = 0) or dbeta (1); each of its 32 warps adds every
// 32nd part, a 128-byte line at a time, and the 32 sums of a column then meet in a fixed tree.
template <class A, class G>
__global__ void __launch_bounds__(kWarp* kWarp) norm_reduce_parts_kernel(NormBackwardParams p) {
  G* out = static_cast<G*>(blockIdx.y == 0 ? p.dgamma : p.dbeta);
  if (out == nullptr) return;
  const int64_t first = int64_t{blockIdx.x} * kWarp;
  const int64_t col = first + threadIdx.x;
  A sum = 0;
  if (col < p.cols) {
    const A* column = static_cast<const A*>(p.partials) + blockIdx.y * p.cols + col;
#pragma unroll 4
    for (int64_t part = threadIdx.y; part < p.parts; part += kWarp)
      sum += column[part * gridDim.y * p.cols];
  }
  sum = transposed_sum(sum);
  if (threadIdx.x == 0 && first + threadIdx.y < p.cols) out[first + threadIdx.y] = narrow<G>(sum);
}

template <int kElements>
int64_t backward_parts(int64_t rows, int64_t cols, int multiprocessors) {
  int64_t row_groups = rows;
  int64_t most = multiprocessors;
  if (row_fits_registers<kElements>(cols)) {
    const dim3 block = row_block<kElements>(cols, kBackwardBlockThreads);
    row_groups = ceil_div(rows, block.y);
    const int64_t resident = kBackwardThreadsPerMultiprocessor / (block.x * block.y);
    most *= resident;
  }
  if (row_groups < 1) return 1;
  return row_groups < most ? row_groups : most;
}

}  // namespace

cudaError_t norm_backward_parts(int64_t rows, int64_t cols, ScalarType dtype, int64_t* parts) {
  DeviceLimits limits;
  const cudaError_t error = current_device_limits(&limits);
  if (error != cudaSuccess) return error;
  return dispatch(dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    return dispatch_access<T>(cols, true, [&](auto a) {
      *parts = backward_parts<kBackwardElements<T, decltype(a)::value>>(rows, cols,
                                                                        limits.multiprocessors);
      return cudaSuccess;
    });
  });
}

cudaError_t norm_reduce_parts(const NormBackwardParams& p, int weight_grads, cudaStream_t stream) {
  return dispatch(p.dtype, p.param_dtype, [&](auto t, auto g) {
    using A = Accumulate<typename decltype(t)::type>;
    const dim3 grid(static_cast<unsigned>(ceil_div(p.cols, kWarp)), weight_grads);
    return launch(norm_reduce_parts_kernel<A, typename decltype(g)::type>, grid, dim3(kWarp, kWarp),
                  kTransposedSumBytes<A>, stream, p);
  });
}

}  // namespace memopt::kernels::cuda
