// AddressSanitizer's interface where the build has it, nothing where it has not.
#pragma once

#include <cstddef>

#if defined(SIMT_ADDRESS_SANITIZER)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt::sanitizer {

#if defined(SIMT_ADDRESS_SANITIZER)

inline void poison(const void* begin, size_t size) {
  __asan_poison_memory_region(begin, size);
}
inline void unpoison(const void* begin, size_t size) {
  __asan_unpoison_memory_region(begin, size);
}
inline void start_switch(void** fake_stack, const void* bottom, size_t size) {
  __sanitizer_start_switch_fiber(fake_stack, bottom, size);
}
inline void finish_switch(void* fake_stack, const void** old_bottom, size_t* old_size) {
  __sanitizer_finish_switch_fiber(fake_stack, old_bottom, old_size);
}

#else

inline void poison(const void*, size_t) {}
inline void unpoison(const void*, size_t) {}
inline void start_switch(void**, const void*, size_t) {}
inline void finish_switch(void*, const void**, size_t*) {}

#endif

}  // namespace simt::sanitizer
