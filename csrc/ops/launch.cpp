#include "launch.h"

#include <c10/util/Exception.h>
#include <unistd.h>

namespace memopt::ops {
namespace {

// Linux reports 0 in some virtual machines and containers; 32 MiB is a common server's share.
int64_t last_level_cache_bytes() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (bytes > 0) return bytes;
#endif
  return int64_t{32} << 20;
}

}  // namespace

const kernels::cpu::Kernels& cpu_kernels(const char* op) {
  const char* error = nullptr;
  const kernels::cpu::Kernels* kernels = kernels::cpu::cpu_kernels(&error);
  TORCH_CHECK(kernels != nullptr, op, ": ", error);
  return *kernels;
}

void no_cuda_kernels(const char* op) {
  TORCH_CHECK(false, op,
              ": input is on a CUDA device, but this build of memopt has no CUDA kernels; rebuild with "
              "MEMOPT_CUDA=1 pip install --no-build-isolation --force-reinstall --no-deps . "
              "(python -m memopt env shows what was built)");
}

bool exceeds_cache(int64_t bytes) {
  static const int64_t cache = last_level_cache_bytes();
  return bytes > cache;
}

}  // namespace memopt::ops
