// The CUDA that the interpreter offers: this header comes before the toolkit's cuda_runtime.h on
// the include path and makes a .cu file compile as host C++. Types and host functions keep the
// toolkit's declarations; fiber.h, block.h and device.cpp give them a body.
//
// It holds the subset that csrc/kernels/cuda uses, and no more: what a kernel uses beyond it does
// not compile.
#pragma once

#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>

// Shared memory is dynamic: one extern array, which the runtime defines. On a local variable, which
// would silently be private to each thread here, this attribute is a compile error.
#undef __shared__
#define __shared__ __attribute__((weak))

#define __launch_bounds__(...)
#define __noinline__ __attribute__((noinline))

extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;
constexpr int warpSize = 32;

namespace simt {

// Where threads meet. A block goes on when all its threads wait at one barrier, a group of lanes
// when all the lanes that its mask names wait at one of the others.
enum class Meeting { kBarrier, kSyncWarp, kShuffle, kShuffleXor, kShuffleDown };

// What a waiting thread brings to a meeting. `operand` is the lane, lane mask or distance of a
// shuffle.
struct Arrival {
  Meeting meeting;
  unsigned mask;
  int operand;
  int width;
  uint64_t value;
  const char* file;
  int line;
};

// Waits until the meeting is complete; returns the value that a shuffle brings the caller.
uint64_t meet(const Arrival& arrival);

// Reports an access that a device would refuse, and ends the calling thread.
void require_aligned(const void* address, size_t alignment, const char* file, int line);

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel,
                   const std::function<void()>& thread);

template <class T>
T shuffle(Meeting meeting, unsigned mask, T value, int operand, int width, const char* file,
          int line) {
  static_assert(std::is_arithmetic_v<T> && sizeof(T) >= 4 && sizeof(T) <= 8,
                "a type that CUDA can shuffle");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = meet({meeting, mask, operand, width, bits, file, line});
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace simt

// The call's own file and line come along as default arguments, so that a report can name them.
#define SIMT_CALL_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(SIMT_CALL_SITE) {
  simt::meet({simt::Meeting::kBarrier, 0, 0, 0, 0, file, line});
}

inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_CALL_SITE) {
  simt::meet({simt::Meeting::kSyncWarp, mask, 0, warpSize, 0, file, line});
}

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = warpSize, SIMT_CALL_SITE) {
  return simt::shuffle(simt::Meeting::kShuffle, mask, value, lane, width, file, line);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = warpSize, SIMT_CALL_SITE) {
  return simt::shuffle(simt::Meeting::kShuffleXor, mask, value, lane_mask, width, file, line);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = warpSize,
                   SIMT_CALL_SITE) {
  return simt::shuffle(simt::Meeting::kShuffleDown, mask, value, static_cast<int>(distance), width,
                       file, line);
}

// Loads and stores with a cache hint: the access itself.
template <class T>
T __ldg(const T* address, SIMT_CALL_SITE) {
  simt::require_aligned(address, sizeof(T), file, line);
  return *address;
}
template <class T>
T __ldcs(const T* address, SIMT_CALL_SITE) {
  return __ldg(address, file, line);
}
template <class T>
T __ldcg(const T* address, SIMT_CALL_SITE) {
  return __ldg(address, file, line);
}
template <class T>
void __stcs(T* address, T value, SIMT_CALL_SITE) {
  simt::require_aligned(address, sizeof(T), file, line);
  *address = value;
}
template <class T>
void __stcg(T* address, T value, SIMT_CALL_SITE) {
  __stcs(address, value, file, line);
}

#undef SIMT_CALL_SITE

inline float __fdividef(float a, float b) {
  return a / b;
}

// Host side: the templates of the toolkit's cuda_runtime.h over its C functions.
template <class... Formal, class... Actual>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Formal...),
                               Actual&&... arguments) {
  static_assert((sizeof(Formal) + ... + 0) <= 4096, "kernel parameters are limited to 4 KB");
  const std::tuple<std::decay_t<Formal>...> formal(std::forward<Actual>(arguments)...);
  return simt::launch(*config, reinterpret_cast<const void*>(kernel),
                      [&] { std::apply(kernel, formal); });
}

template <class F>
cudaError_t cudaFuncSetAttribute(F* kernel, cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

template <class F>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, F* kernel, int block_size,
                                                          size_t dynamic_shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      blocks, reinterpret_cast<const void*>(kernel), block_size, dynamic_shared);
}
