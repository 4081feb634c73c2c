// The compiler puts a call before each access of a kernel to memory (-fsanitize=kernel-address,
// made for programs that bring their own run-time library, such as a Linux kernel): what it touches
// is looked up in the guard zones.
#include "guards.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "block.h"
#include "traffic.h"

namespace simt {
namespace {

struct Zone {
  uintptr_t begin;
  uintptr_t end;
};

std::vector<Zone> zones;  // by address
Zone shared = {0, 0};     // beyond the launch's shared memory
size_t shared_size = 0;   // that the launch asked for
Zone gap = {0, 0};        // where the last access lay: no zone begins or ends within

uintptr_t address_of(const void* p) {
  return reinterpret_cast<uintptr_t>(p);
}

bool begins_before(const Zone& zone, uintptr_t address) {
  return zone.begin < address;
}

void check(uintptr_t address, size_t size, bool is_load) {
  count_access(address, size, is_load);
  const char* verb = is_load ? "read" : "written";
  const uintptr_t end = address + size;
  if (address >= gap.begin && end <= gap.end) return;
  if (end > shared.begin && address < shared.end) {
    report(std::string("shared memory: ") + verb + " beyond the " + std::to_string(shared_size) +
           " bytes that the launch asked for");
  }
  const auto behind = std::lower_bound(zones.begin(), zones.end(), end, begins_before);
  Zone found = {0, UINTPTR_MAX};
  if (behind != zones.end()) found.end = behind->begin;
  if (behind != zones.begin()) {
    const Zone& before = *std::prev(behind);
    if (before.end > address) {
      report("out of bounds: " + std::to_string(size) + " bytes " + verb + " " +
             std::to_string(static_cast<int64_t>(address - before.begin)) +
             " bytes behind a buffer");
    }
    found.begin = before.end;
  }
  // Shared memory, which is in none of the zones, ends the gap as well.
  if (shared.begin >= end) found.end = std::min(found.end, shared.begin);
  if (shared.end <= address) found.begin = std::max(found.begin, shared.end);
  gap = found;
}

}  // namespace

void guard(const void* begin, size_t size) {
  if (size == 0) return;
  gap = {0, 0};
  const uintptr_t address = address_of(begin);
  const auto behind = std::lower_bound(zones.begin(), zones.end(), address, begins_before);
  zones.insert(behind, {address, address + size});
}

void unguard(const void* begin, size_t size) {
  if (size == 0) return;
  gap = {0, 0};
  const auto found = std::lower_bound(zones.begin(), zones.end(), address_of(begin), begins_before);
  if (found != zones.end() && found->begin == address_of(begin)) zones.erase(found);
}

void guard_shared_memory(const unsigned char* begin, size_t size, size_t arena) {
  gap = {0, 0};
  shared = {address_of(begin + size), address_of(begin + arena)};
  shared_size = size;
}

}  // namespace simt

extern "C" {

#define SIMT_ACCESS(size)                                \
  void __asan_load##size##_noabort(uintptr_t address) {  \
    simt::check(address, size, /*is_load=*/true);        \
  }                                                      \
  void __asan_store##size##_noabort(uintptr_t address) { \
    simt::check(address, size, /*is_load=*/false);       \
  }
SIMT_ACCESS(1)
SIMT_ACCESS(2)
SIMT_ACCESS(4)
SIMT_ACCESS(8)
SIMT_ACCESS(16)
#undef SIMT_ACCESS

void __asan_loadN_noabort(uintptr_t address, size_t size) {
  simt::check(address, size, /*is_load=*/true);
}
void __asan_storeN_noabort(uintptr_t address, size_t size) {
  simt::check(address, size, /*is_load=*/false);
}

void __asan_handle_no_return() {}

void simt_guard(const void* begin, size_t size) {
  simt::guard(begin, size);
}
void simt_unguard(const void* begin, size_t size) {
  simt::unguard(begin, size);
}

}  // extern "C"
