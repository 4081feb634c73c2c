// How many bytes kernels read from and write to each of some buffers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace simt {

// Of an access, whatever it touches. Costs nothing while no buffer is watched.
void count_access(uintptr_t address, size_t size, bool is_load);

}  // namespace simt
