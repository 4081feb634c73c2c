// What a kernel reads and writes a little later.
#pragma once

#include "vec.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

// The lines that a step loads, or stores to, soon, 1 KiB from here. Vectors of a whole line wait
// for it where it comes from the last-level cache or memory, longer than those of half a line.
template <class E, class T, int kStores>
MEMOPT_INLINE void prefetch_step(const T* p) {
  const auto* const soon = reinterpret_cast<const char*>(p) + 1024;
  for (int64_t i = 0; i < E::kStep * static_cast<int64_t>(sizeof(T)); i += 64) {
    __builtin_prefetch(soon + i, kStores);
  }
}
template <class E, class T>
MEMOPT_INLINE void prefetch_loads(const T* p) {
  prefetch_step<E, T, 0>(p);
}
template <class E, class T>
MEMOPT_INLINE void prefetch_stores(const T* p) {
  prefetch_step<E, T, 1>(p);
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
