#include "launch.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <fstream>

namespace memopt::ops {
namespace {

// MEMOPT_CPU_CACHE_BYTES, for tests; else what Linux says of the first core's share (sysconf adds
// up all cores of some machines); else 32 MiB, a common server's.
int64_t last_level_cache_bytes() {
  if (const char* given = std::getenv("MEMOPT_CPU_CACHE_BYTES")) return std::atoll(given);
  std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");  // "32768K"
  int64_t kibibytes = 0;
  return file >> kibibytes ? kibibytes << 10 : int64_t{32} << 20;
}

}  // namespace

const kernels::cpu::Kernels& cpu_kernels(const char* op) {
  const char* error = nullptr;
  const kernels::cpu::Kernels* kernels = kernels::cpu::cpu_kernels(&error);
  TORCH_CHECK(kernels != nullptr, op, ": ", error);
  return *kernels;
}

void no_cuda_kernels(const char* op) {
  TORCH_CHECK(
      false, op,
      ": input is on a CUDA device, but this build of memopt has no CUDA kernels; rebuild with "
      "MEMOPT_CUDA=1 pip install --no-build-isolation --force-reinstall --no-deps . "
      "(python -m memopt env shows what was built)");
}

bool is_captured([[maybe_unused]] const at::Tensor& tensor) {
#if defined(MEMOPT_WITH_CUDA)
  if (!tensor.is_cuda()) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(current_stream(tensor), &status) == cudaSuccess &&
         status != cudaStreamCaptureStatusNone;
#else
  return false;
#endif
}

bool exceeds_cache(const at::Tensor& tensor, int64_t tensors) {
  static const int64_t cache = last_level_cache_bytes();
  return tensors * static_cast<int64_t>(tensor.nbytes()) > cache;
}

}  // namespace memopt::ops
