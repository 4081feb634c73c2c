#include "shared_memory.h"

#include <cstring>

#include "guards.h"

// What kernels declare as `extern __shared__ __align__(16) unsigned char memopt_shared[]`.
alignas(16) unsigned char memopt_shared[simt::kSharedMemoryArena];

namespace simt {

void prepare_shared_memory(size_t size) {
  std::memset(memopt_shared, 0xff, size);
  guard_shared_memory(memopt_shared, size, kSharedMemoryArena);
}

}  // namespace simt
