// Gated units forward and backward over a range of y's elements. Formulas: kernels/gated.h.
#include "../gated.h"

#include <algorithm>

#include "kernels.h"
#include "table.h"
#include "vec.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {
namespace {

// Two vectors of neighbouring elements to their even and odd ones, and back.
MEMOPT_INLINE Step<FloatVec> deinterleave(Step<FloatVec> s) {
  const auto [even, odd] = at::vec::deinterleave2<float>(s.lo, s.hi);
  return {even, odd};
}
MEMOPT_INLINE Step<double> deinterleave(Step<double> s) {
  return s;
}
MEMOPT_INLINE Step<FloatVec> interleave(FloatVec even, FloatVec odd) {
  const auto [lo, hi] = at::vec::interleave2<float>(even, odd);
  return {lo, hi};
}
MEMOPT_INLINE Step<double> interleave(double even, double odd) {
  return {even, odd};
}

// A step of gate and of up from one array where they alternate: two steps of that, or of a tail the
// first `count` pairs.
template <class T>
struct Alternating {
  using E = Elements<T>;
  using S = Step<typename E::V>;
  static constexpr int64_t kStep = E::kStep;

  static MEMOPT_INLINE void read(const T* p, Whole, S* gate, S* up) {
    split(E::load(p), E::load(p + kStep), gate, up);
  }
  static MEMOPT_INLINE void read(const T* p, Tail tail, S* gate, S* up) {
    const int64_t n = 2 * tail.count;
    const S first = n < kStep ? E::load(p, n) : E::load(p);
    split(first, n > kStep ? E::load(p + kStep, n - kStep) : first, gate, up);
  }
  static MEMOPT_INLINE void write(T* p, S gate, S up, Whole, bool streamed) {
    store<E>(p, interleave(gate.lo, up.lo), Whole{}, streamed);
    store<E>(p + kStep, interleave(gate.hi, up.hi), Whole{}, streamed);
  }
  static MEMOPT_INLINE void write(T* p, S gate, S up, Tail tail, bool) {
    const int64_t n = 2 * tail.count;
    if (n < kStep) return E::store(p, interleave(gate.lo, up.lo), n);
    E::store(p, interleave(gate.lo, up.lo));
    if (n > kStep) E::store(p + kStep, interleave(gate.hi, up.hi), n - kStep);
  }

 private:
  static MEMOPT_INLINE void split(S a, S b, S* gate, S* up) {
    a = deinterleave(a);
    b = deinterleave(b);
    *gate = {a.lo, b.lo};
    *up = {a.hi, b.hi};
  }
};

// f(row, first column, columns) for every row of the elements [begin, end).
template <class F>
MEMOPT_INLINE void for_rows(int64_t cols, int64_t begin, int64_t end, F&& f) {
  int64_t row = begin / cols, col = begin % cols;
  while (begin < end) {
    const int64_t n = std::min(cols - col, end - begin);
    f(row, col, n);
    begin += n;
    row += 1;
    col = 0;
  }
}

template <class T>
MEMOPT_INLINE T* at_element(const void* p, int64_t element) {
  return p ? static_cast<T*>(const_cast<void*>(p)) + element : nullptr;
}

template <class Function, class T, bool kInterleaved>
void forward(const GatedForwardParams& p, int64_t begin, int64_t end) {
  using E = std::conditional_t<kInterleaved, Elements<T>, UnorderedElements<T>>;
  using S = Step<typename E::V>;
  constexpr int64_t kApart = kInterleaved ? 2 : 1;
  for_rows(p.cols, begin, end, [&](int64_t row, int64_t col, int64_t n) {
    const T* gate = at_element<const T>(p.gate, row * p.gate_row_stride + kApart * col);
    const T* up = at_element<const T>(p.up, row * p.up_row_stride + kApart * col);
    T* y = at_element<T>(p.y, row * p.cols + col);
    const bool streamed = p.stream_stores && is_aligned(y);
    for_steps<T>(0, n, [&](int64_t i, auto extent) __attribute__((always_inline)) {
      S g, u;
      if constexpr (kInterleaved) {
        Alternating<T>::read(gate + 2 * i, extent, &g, &u);
      } else {
        g = load<E>(gate + i, extent);
        u = load<E>(up + i, extent);
      }
      const S result = {gated_value<Function>(g.lo, u.lo), gated_value<Function>(g.hi, u.hi)};
      store<E>(y + i, result, extent, streamed);
    });
  });
  if (p.stream_stores) stream_fence();
}

template <class Function, class T, bool kInterleaved>
void backward(const GatedBackwardParams& p, int64_t begin, int64_t end) {
  using E = std::conditional_t<kInterleaved, Elements<T>, UnorderedElements<T>>;
  using V = typename E::V;
  using S = Step<V>;
  constexpr int64_t kApart = kInterleaved ? 2 : 1;
  for_rows(p.cols, begin, end, [&](int64_t row, int64_t col, int64_t n) {
    const T* dy = at_element<const T>(p.dy, row * p.dy_row_stride + col);
    const T* gate = at_element<const T>(p.gate, row * p.gate_row_stride + kApart * col);
    const T* up = at_element<const T>(p.up, row * p.up_row_stride + kApart * col);
    T* dgate = at_element<T>(p.dgate, row * p.grad_row_stride + kApart * col);
    T* dup = at_element<T>(p.dup, row * p.grad_row_stride + kApart * col);
    T* y = at_element<T>(p.y, row * p.cols + col);
    const auto ready = [](const T* to) { return !to || is_aligned(to); };
    const bool streamed =
        p.stream_stores && ready(dgate) && (kInterleaved || ready(dup)) && ready(y);
    for_steps<T>(0, n, [&](int64_t i, auto extent) __attribute__((always_inline)) {
      S g, u = {V(0.0f), V(0.0f)};
      if constexpr (kInterleaved) {
        Alternating<T>::read(gate + 2 * i, extent, &g, &u);
      } else {
        g = load<E>(gate + i, extent);
        if (up) u = load<E>(up + i, extent);
      }
      const S d = load<E>(dy + i, extent);
      const auto lo = gated_grad<Function>(d.lo, g.lo, u.lo);
      const auto hi = gated_grad<Function>(d.hi, g.hi, u.hi);
      const S to_gate = {lo.dgate, hi.dgate}, to_up = {lo.dup, hi.dup};
      if constexpr (kInterleaved) {
        Alternating<T>::write(dgate + 2 * i, to_gate, to_up, extent, streamed);
      } else {
        if (dgate) store<E>(dgate + i, to_gate, extent, streamed);
        if (dup) store<E>(dup + i, to_up, extent, streamed);
      }
      if (y) store<E>(y + i, S{lo.y, hi.y}, extent, streamed);
    });
  });
  if (p.stream_stores) stream_fence();
}

}  // namespace

void gated_forward(const GatedForwardParams& p, int64_t begin, int64_t end) {
  with_types(p.dtype, p.dtype, [&](auto t, auto) {
    using T = decltype(t);
    with_activation(p.activation, [&](auto f) {
      using Function = decltype(f);
      p.interleaved ? forward<Function, T, true>(p, begin, end)
                    : forward<Function, T, false>(p, begin, end);
    });
  });
}

void gated_backward(const GatedBackwardParams& p, int64_t begin, int64_t end) {
  with_types(p.dtype, p.dtype, [&](auto t, auto) {
    using T = decltype(t);
    with_activation(p.activation, [&](auto f) {
      using Function = decltype(f);
      p.interleaved ? backward<Function, T, true>(p, begin, end)
                    : backward<Function, T, false>(p, begin, end);
    });
  });
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
