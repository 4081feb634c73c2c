// Sums in two arrays. Formulas: kernels/split_sum.h. Plain loops, which compilers make vectors of.
#include "../split_sum.h"

#include "kernels.h"
#include "table.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

void split_sum(const SplitSumParams& p, int64_t begin, int64_t end) {
  uint16_t* const __restrict upper = p.upper;
  uint8_t* const __restrict lower = p.lower;
  const uint16_t* const __restrict x = p.x;
  if (x == nullptr) {
    for (int64_t i = begin; i < end; ++i) {
      upper[i] = static_cast<uint16_t>(rounded_sum(upper[i], lower[i]));
    }
    return;
  }
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t bits = kernels::split_sum(upper[i], lower[i], x[i]);
    upper[i] = static_cast<uint16_t>(bits >> 8);
    lower[i] = static_cast<uint8_t>(bits);
  }
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
