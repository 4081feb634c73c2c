// Dropout over a range of a contiguous array, forward and backward alike. The rule:
// kernels/dropout.h.
#include "../dropout.h"

#include <algorithm>

#include "keep_scales.h"
#include "kernels.h"
#include "table.h"
#include "vec.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

void dropout(const DropoutParams& p, int64_t first, int64_t last) {
  with_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    const T* x = static_cast<const T*>(p.x);
    T* y = static_cast<T*>(p.y);
    const bool streamed = p.stream_stores && is_aligned(y + first);
    KeepScales<T> scales(make_keeper<Accumulate<T>>(p.rule));
    for (int64_t begin = first; begin < last; begin += kKeepBlock) {
      const int64_t count = std::min(kKeepBlock, last - begin);
      const auto* keep = scales.at(static_cast<uint64_t>(begin), count);
      for_steps<T>(0, count, [&](int64_t i, auto extent) __attribute__((always_inline)) {
        const auto v = load(x + begin + i, extent);
        const auto k = load_keep<T>(keep + i);
        store(y + begin + i, Step{v.lo * k.lo, v.hi * k.hi}, extent, streamed);
      });
    }
    if (streamed) stream_fence();
  });
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
