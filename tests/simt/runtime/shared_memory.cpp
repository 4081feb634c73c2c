#include "shared_memory.h"

#include <cstring>

#include "sanitizer.h"

// What kernels declare as `extern __shared__ __align__(16) unsigned char memopt_shared[]`.
alignas(16) unsigned char memopt_shared[simt::kSharedMemoryArena];

namespace simt {

constexpr unsigned char kPoison = 0xff;

void prepare_shared_memory(size_t size) {
  sanitizer::unpoison(memopt_shared, kSharedMemoryArena);
  std::memset(memopt_shared, kPoison, kSharedMemoryArena);
  sanitizer::poison(memopt_shared + size, kSharedMemoryArena - size);
}

bool shared_memory_guard_is_intact(size_t size) {
  sanitizer::unpoison(memopt_shared, kSharedMemoryArena);
  const unsigned char* guard = memopt_shared + size;
  const size_t rest = kSharedMemoryArena - size;
  return guard[0] == kPoison && std::memcmp(guard, guard + 1, rest - 1) == 0;
}

}  // namespace simt
