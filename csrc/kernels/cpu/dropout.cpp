// Dropout over a range of a contiguous array, forward and backward alike. The rule:
// kernels/dropout.h.
#include "../dropout.h"

#include "keep_scales.h"
#include "kernels.h"
#include "table.h"
#include "vec.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

void dropout(const DropoutParams& p, int64_t begin, int64_t end) {
  with_types(p.dtype, p.dtype, [&](auto t, auto) {
    using T = decltype(t);
    const T* x = static_cast<const T*>(p.x) + begin;
    T* y = static_cast<T*>(p.y) + begin;
    const bool streamed = p.stream_stores && is_aligned(y);
    KeepScales<T> scales(make_keeper<Accumulate<T>>(p.rule));
    for_steps<T>(0, end - begin, [&](int64_t i, auto extent) __attribute__((always_inline)) {
      const auto v = load(x + i, extent);
      const auto keep = scales.at(static_cast<uint64_t>(begin + i));
      store(y + i, Step{v.lo * keep.lo, v.hi * keep.hi}, extent, streamed);
    });
    if (streamed) stream_fence();
  });
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
