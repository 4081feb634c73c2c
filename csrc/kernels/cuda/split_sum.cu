// Sums in two arrays. Formulas: kernels/split_sum.h.
//
// Memory: an addition reads 5 bytes an element and writes 3, neighbouring threads neighbouring
// elements; beside the product that made x it is a few per cent.
#include "../split_sum.h"

#include "launch.cuh"
#include "launchers.h"

namespace memopt::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) split_sum_kernel(SplitSumParams p) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < p.size; i += step) {
    if (p.x == nullptr) {
      p.upper[i] = static_cast<uint16_t>(rounded_sum(p.upper[i], p.lower[i]));
    } else {
      const uint32_t bits = kernels::split_sum(p.upper[i], p.lower[i], p.x[i]);
      p.upper[i] = static_cast<uint16_t>(bits >> 8);
      p.lower[i] = static_cast<uint8_t>(bits);
    }
  }
}

}  // namespace

cudaError_t split_sum(const SplitSumParams& p, cudaStream_t stream) {
  if (p.size == 0) return cudaSuccess;
  DeviceLimits limits;
  const cudaError_t error = current_device_limits(&limits);
  if (error != cudaSuccess) return error;
  return launch(split_sum_kernel, dim3(strided_grid(ceil_div(p.size, kThreads), limits)),
                dim3(kThreads), 0, stream, p);
}

}  // namespace memopt::kernels::cuda
