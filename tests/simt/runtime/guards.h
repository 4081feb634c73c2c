// Memory that no kernel may touch: what lies around the buffers of a launch, and beyond its shared
// memory.
#pragma once

#include <cstddef>

namespace simt {

void guard(const void* begin, size_t size);
void unguard(const void* begin, size_t size);

// Of the `arena` bytes at `begin` all but the first `size`.
void guard_shared_memory(const unsigned char* begin, size_t size, size_t arena);

}  // namespace simt
