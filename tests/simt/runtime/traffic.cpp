#include "traffic.h"

#include <vector>

namespace simt {
namespace {

struct Watched {
  uintptr_t begin;
  uintptr_t end;
  int64_t loaded;
  int64_t stored;
};

std::vector<Watched> buffers;

}  // namespace

void count_access(uintptr_t address, size_t size, bool is_load) {
  for (Watched& buffer : buffers) {
    if (address < buffer.begin || address >= buffer.end) continue;
    (is_load ? buffer.loaded : buffer.stored) += static_cast<int64_t>(size);
    return;
  }
}

}  // namespace simt

extern "C" {

// From here on this memory is watched; its number is how many were before.
void simt_watch(const void* begin, size_t size) {
  const auto address = reinterpret_cast<uintptr_t>(begin);
  simt::buffers.push_back({address, address + size, 0, 0});
}

int64_t simt_loaded(int64_t number) {
  return simt::buffers[static_cast<size_t>(number)].loaded;
}

int64_t simt_stored(int64_t number) {
  return simt::buffers[static_cast<size_t>(number)].stored;
}

void simt_unwatch() {
  simt::buffers.clear();
}

}  // extern "C"
