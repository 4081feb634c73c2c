// What every launcher shares: from run-time element types to template arguments, the device's
// limits, the launch.
//
// Kernels are launched with cudaLaunchKernelEx, never <<<>>>, and all shared memory is dynamic and
// comes from the one declaration below: so a plain C++ compiler can compile these files as well,
// for the test interpreter (tests/simt).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "../common.h"

extern __shared__ __align__(16) unsigned char memopt_shared[];

namespace memopt::kernels::cuda {

// The block's dynamic shared memory from `offset` bytes on; `offset` keeps T aligned.
template <class T>
__device__ __forceinline__ T* shared_memory(int64_t offset = 0) {
  return reinterpret_cast<T*>(memopt_shared + offset);
}

template <class T>
struct Type {
  using type = T;
};

// f(Type<T>{}) with the element type that `dtype` names.
template <class F>
cudaError_t dispatch(ScalarType dtype, F&& f) {
  switch (dtype) {
    case ScalarType::kFloat:
      return f(Type<float>{});
    case ScalarType::kHalf:
      return f(Type<__half>{});
    case ScalarType::kBFloat16:
      return f(Type<__nv_bfloat16>{});
    case ScalarType::kDouble:
      return f(Type<double>{});
  }
  return cudaErrorInvalidValue;
}

// f(Type<T>{}, Type<G>{}) with the element types of tensors and parameters: G is T, or float beside
// the 2-byte types.
template <class F>
cudaError_t dispatch(ScalarType dtype, ScalarType param_dtype, F&& f) {
  return dispatch(dtype, [&](auto t) {
    if (param_dtype == dtype) return f(t, t);
    if constexpr (sizeof(typename decltype(t)::type) == 2) {
      if (param_dtype == ScalarType::kFloat) return f(t, Type<float>{});
    }
    return cudaErrorInvalidValue;
  });
}

struct DeviceLimits {
  int multiprocessors;
  int shared_bytes_per_block;
};

inline cudaError_t current_device_limits(DeviceLimits* limits) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error =
        cudaDeviceGetAttribute(&limits->multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&limits->shared_bytes_per_block,
                                   cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  return error;
}

// Blocks for `work` block-sized pieces that the kernel strides over. Up to 64 waves of one block a
// multiprocessor the hardware's scheduler balances the load; beyond that a longer grid would only
// repeat each block's set-up.
inline unsigned strided_grid(int64_t work, const DeviceLimits& limits) {
  const int64_t most = int64_t{64} * limits.multiprocessors;
  return static_cast<unsigned>(work < most ? work : most);
}

// Queues one kernel. A failed launch leaves no error behind for the next caller of
// cudaGetLastError() to trip over.
template <class... Params>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, int64_t shared_bytes,
                   cudaStream_t stream, Params... params) {
  constexpr int64_t kWithoutOptIn = 48 * 1024;
  cudaError_t error = cudaSuccess;
  if (shared_bytes > kWithoutOptIn) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes));
  }
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream;
    error = cudaLaunchKernelEx(&config, kernel, params...);
  }
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error;
}

}  // namespace memopt::kernels::cuda
