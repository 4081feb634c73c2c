// From an op to the kernels of a tensor's device: threads on the CPU, the current stream on CUDA,
// nothing on meta.
//
// Streams and devices come through PyTorch's device-generic interfaces, so that a memopt built
// beside any PyTorch links the same way.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "../kernels/cpu/kernels.h"

#if defined(MEMOPT_WITH_CUDA)
#include "../kernels/cuda/launchers.h"
// A launcher of kernels/cuda/launchers.h, or null in a build without CUDA.
#define MEMOPT_CUDA_KERNEL(name) (&::memopt::kernels::cuda::name)
#else
#define MEMOPT_CUDA_KERNEL(name) (nullptr)
#endif

namespace memopt::ops {

// The instruction set's table; an error if MEMOPT_CPU_CAPABILITY asks for one that cannot be had.
const kernels::cpu::Kernels& cpu_kernels(const char* op);

// Elements that are worth a thread: about 10 us of work.
constexpr int64_t kGrainElements = 32768;

// Splits [0, count) items of `elements_each` elements among threads.
template <class Body>
void parallel(int64_t count, int64_t elements_each, const Body& body) {
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, elements_each));
  at::parallel_for(0, count, grain, body);
}

// Splits the elements [0, size) of dense arrays: body(begin, end), in blocks that are a multiple of
// every vector and cache line.
template <class Body>
void parallel_blocks(int64_t size, const Body& body) {
  constexpr int64_t kBlock = 4096;
  parallel(kernels::ceil_div(size, kBlock), kBlock,
           [&](int64_t begin, int64_t end) { body(begin * kBlock, std::min(end * kBlock, size)); });
}

#if defined(MEMOPT_WITH_CUDA)
// Of `tensor`'s device.
inline cudaStream_t current_stream(const at::Tensor& tensor) {
  const c10::impl::VirtualGuardImpl device(tensor.device().type());
  return static_cast<cudaStream_t>(device.getStream(tensor.device()).native_handle());
}
#endif

[[noreturn]] void no_cuda_kernels(const char* op);

// Calls cpu(kernels) on the CPU, or cuda(arguments..., stream) on CUDA, checking what it returns;
// nothing on meta. `tensor` names the device.
template <class Cpu, class Cuda, class... Arguments>
void launch(const char* op, const at::Tensor& tensor, Cpu cpu, Cuda cuda,
            const Arguments&... arguments) {
  if (tensor.is_cpu()) {
    cpu(cpu_kernels(op));
  } else if (tensor.is_cuda()) {
#if defined(MEMOPT_WITH_CUDA)
    const c10::DeviceGuard guard(tensor.device());
    const cudaError_t status = cuda(arguments..., current_stream(tensor));
    TORCH_CHECK(status == cudaSuccess, op,
                ": CUDA kernel launch failed: ", cudaGetErrorString(status));
#else
    no_cuda_kernels(op);
#endif
  } else {
    TORCH_CHECK(tensor.is_meta(), op, ": no kernel for ", tensor.device());
  }
}

// Whether what is launched on `tensor`'s device now is captured into a CUDA graph and runs later.
bool is_captured(const at::Tensor& tensor);

// Whether a kernel that reads and writes this many tensors like `tensor` should store past the
// caches: they are more than the last-level cache holds, so results will be read back from memory
// anyway, and reading their lines in before overwriting them would be wasted.
bool exceeds_cache(const at::Tensor& tensor, int64_t tensors);

}  // namespace memopt::ops
