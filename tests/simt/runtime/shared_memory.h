// The dynamic shared memory of the block that runs.
#pragma once

#include <cstddef>

namespace simt {

constexpr size_t kSharedMemoryArena = 256 * 1024;  // more than any launch may ask for

// Fills shared memory with a pattern that reads as NaN in every floating-point type, so that a
// value which no thread has written shows in the results. What lies beyond `size` is a guard.
void prepare_shared_memory(size_t size);

}  // namespace simt
