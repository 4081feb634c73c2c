// gamma and beta as the norms' row kernels read them, and what asks for the next row.
#pragma once

#include <memory>

#include "../norm.h"
#include "vec.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

// A parameter in the type of sums: itself, or a copy that serves all rows of a range, so that row
// kernels need not know the parameters' type. Null stays null.
template <class A>
class Parameter {
 public:
  Parameter(const void* p, ScalarType dtype, int64_t cols) : data_(static_cast<const A*>(p)) {
    if (p == nullptr || sizeof(A) == 8 || dtype == ScalarType::kFloat) return;
    copy_.reset(new A[cols]);
    data_ = copy_.get();
    if (dtype == ScalarType::kHalf) {
      widen(static_cast<const c10::Half*>(p), cols);
    } else {
      widen(static_cast<const c10::BFloat16*>(p), cols);
    }
  }
  const A* data() const { return data_; }

 private:
  template <class G>
  void widen(const G* from, int64_t cols) {
    if constexpr (sizeof(A) == 4) {
      for_steps<G>(0, cols, [&](int64_t i, auto extent) __attribute__((always_inline)) {
        store(copy_.get() + i, load(from + i, extent), extent);
      });
    }
  }

  const A* data_;
  std::unique_ptr<A[]> copy_;
};

// gamma or beta of a step; `otherwise` where there is none.
template <class V, class A, class Extent>
MEMOPT_INLINE Step<V> load_parameter(const A* p, int64_t i, Extent extent, float otherwise) {
  if (p == nullptr) return {V(otherwise), V(otherwise)};
  return load(p + i, extent);
}

// The scale of a step, from gamma; `offset` is scale_offset().
template <class Norm, class V, class A, class Extent>
MEMOPT_INLINE Step<V> load_scale(const A* gamma, V offset, int64_t i, Extent extent) {
  using S = typename Norm::Statistics;
  const Step<V> v = load_parameter<V>(gamma, i, extent, 1.0f);
  return {S::scale(v.lo, offset), S::scale(v.hi, offset)};
}

// Asks for the lines of the step that begins `ahead` elements on. That may lie beyond the array: a
// prefetch never faults.
template <class T>
MEMOPT_INLINE void prefetch_step(const T* p, int64_t ahead) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(p) + ahead * sizeof(T);
  constexpr uintptr_t kBytes = Elements<T>::kStep * sizeof(T);
  for (uintptr_t line = 0; line < kBytes; line += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(address + line), 0, 2);
  }
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
