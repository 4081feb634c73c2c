// Gated units forward and backward over a range of y's elements. Formulas: kernels/gated.h.
//
// Where gate and up alternate in one array, they are taken apart into two blocks that stay in the
// first-level cache, and their gradients put together from two: so one kernel serves both layouts.
#include "../gated.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <type_traits>

#include "kernels.h"
#include "rounded_to.h"
#include "table.h"
#include "vec.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {
namespace {

// Elements of gate in a block.
constexpr int64_t kBlock = 512;

// 16-bit elements are taken apart and put together two at a time, as the halves of a word: that
// compilers do with vectors. Of floats they make slow ones, so these are vectors here.
template <class T>
constexpr bool kHasWord = sizeof(T) <= 4 && std::endian::native == std::endian::little;
template <class T>
using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
template <class T>
using Word = std::conditional_t<sizeof(T) == 2, uint32_t, uint64_t>;

// `count` pairs of neighbours: to two arrays, and from two.
template <class T>
void take_apart(const T* __restrict pairs, int64_t count, T* __restrict gate, T* __restrict up) {
  int64_t i = 0;
#if !defined(MEMOPT_NO_VECTORS)
  if constexpr (std::is_same_v<T, float>) {
    constexpr int64_t kLanes = FloatVec::size();
    for (; i + kLanes <= count; i += kLanes) {
      const auto [even, odd] = at::vec::deinterleave2<float>(
          FloatVec::loadu(pairs + 2 * i), FloatVec::loadu(pairs + 2 * i + kLanes));
      even.store(gate + i);
      odd.store(up + i);
    }
  }
#endif
  if constexpr (kHasWord<T>) {
    for (; i < count; ++i) {
      Word<T> word;
      std::memcpy(&word, pairs + 2 * i, sizeof(word));
      const auto low = static_cast<Bits<T>>(word);
      const auto high = static_cast<Bits<T>>(word >> 8 * sizeof(T));
      std::memcpy(static_cast<void*>(gate + i), &low, sizeof(low));
      std::memcpy(static_cast<void*>(up + i), &high, sizeof(high));
    }
  } else {
    for (; i < count; ++i) {
      gate[i] = pairs[2 * i];
      up[i] = pairs[2 * i + 1];
    }
  }
}
template <class T>
void put_together(const T* __restrict gate, const T* __restrict up, int64_t count,
                  T* __restrict pairs) {
  int64_t i = 0;
#if !defined(MEMOPT_NO_VECTORS)
  if constexpr (std::is_same_v<T, float>) {
    constexpr int64_t kLanes = FloatVec::size();
    for (; i + kLanes <= count; i += kLanes) {
      const auto [low, high] =
          at::vec::interleave2<float>(FloatVec::loadu(gate + i), FloatVec::loadu(up + i));
      low.store(pairs + 2 * i);
      high.store(pairs + 2 * i + kLanes);
    }
  }
#endif
  if constexpr (kHasWord<T>) {
    for (; i < count; ++i) {
      Bits<T> low, high;
      std::memcpy(&low, gate + i, sizeof(low));
      std::memcpy(&high, up + i, sizeof(high));
      const Word<T> word = low | static_cast<Word<T>>(high) << 8 * sizeof(T);
      std::memcpy(static_cast<void*>(pairs + 2 * i), &word, sizeof(word));
    }
  } else {
    for (; i < count; ++i) {
      pairs[2 * i] = gate[i];
      pairs[2 * i + 1] = up[i];
    }
  }
}

// The same past the caches, if `streamed` and `pairs` allows it.
template <class T>
void put_together(const T* gate, const T* up, int64_t count, T* pairs, bool streamed) {
  if (!streamed || !is_aligned(pairs)) return put_together(gate, up, count, pairs);
  alignas(64) T block[2 * kBlock];
  put_together(gate, up, count, block);
  constexpr int64_t kVector = kStreamBytes / sizeof(T);
  int64_t i = 0;
  for (; i + kVector <= 2 * count; i += kVector) stream_vector(pairs + i, block + i);
  std::copy_n(block + i, 2 * count - i, pairs + i);
}

// f(row, first column, columns) for every row of the elements [begin, end), at most `most` columns
// at a time.
template <class F>
MEMOPT_INLINE void for_rows(int64_t cols, int64_t begin, int64_t end, int64_t most, F&& f) {
  int64_t row = begin / cols, col = begin % cols;
  while (begin < end) {
    const int64_t n = std::min({cols - col, end - begin, most});
    f(row, col, n);
    begin += n;
    col += n;
    if (col < cols) continue;
    row += 1;
    col = 0;
  }
}

template <class T>
MEMOPT_INLINE T* at_element(const void* p, int64_t element) {
  return p ? static_cast<T*>(const_cast<void*>(p)) + element : nullptr;
}

template <class T>
using In = std::array<const T*, 3>;  // gate, up, dy; up may be null where y and dgate are
template <class T>
using Out = std::array<T*, 3>;  // y, dgate, dup; each may be null in backward

// Whole steps of neighbours.
template <class T, class Function>
__attribute__((noinline)) void forward_steps(const Function f, In<T> in, Out<T> out, int64_t count,
                                             bool streamed) {
  using E = UnorderedElements<T>;
  const T *const gate = in[0], *const up = in[1];
  T* const y = out[0];
  for (int64_t i = 0; i < count; i += E::kStep) {
    const auto g = E::load(gate + i);
    const auto u = E::load(up + i);
    store<E>(y + i, Step{gated_value(f, g.lo, u.lo), gated_value(f, g.hi, u.hi)}, Whole{},
             streamed);
  }
}

// Which stores go past the caches.
struct Streamed {
  bool grads;
  bool y;
};

template <class T, class Function>
__attribute__((noinline)) void backward_steps(const Function f, In<T> in, Out<T> out, int64_t count,
                                              Streamed streamed) {
  using E = UnorderedElements<T>;
  using V = typename E::V;
  const auto [gate, up, dy] = in;
  const auto [y, dgate, dup] = out;
  for (int64_t i = 0; i < count; i += E::kStep) {
    const Step<V> g = E::load(gate + i);
    Step<V> u = {V(0.0f), V(0.0f)};
    if (up) u = E::load(up + i);
    const Step<V> d = E::load(dy + i);
    const auto lo = gated_grad(f, d.lo, g.lo, u.lo);
    const auto hi = gated_grad(f, d.hi, g.hi, u.hi);
    if (dgate) store<E>(dgate + i, Step<V>{lo.dgate, hi.dgate}, Whole{}, streamed.grads);
    if (dup) store<E>(dup + i, Step<V>{lo.dup, hi.dup}, Whole{}, streamed.grads);
    if (y) store<E>(y + i, Step<V>{lo.y, hi.y}, Whole{}, streamed.y);
  }
}

// Two blocks in the place of an array where elements alternate.
template <class T>
struct Blocks {
  alignas(64) T gate[kBlock];
  alignas(64) T up[kBlock];
};

template <class T, class Function>
void forward(const Function& f, const GatedForwardParams& p, int64_t begin, int64_t end) {
  const bool apart = p.interleaved;
  Blocks<T> in;
  for_rows(p.cols, begin, end, apart ? kBlock : end, [&](int64_t row, int64_t col, int64_t n) {
    const int64_t first = apart ? 2 * col : col;
    In<T> from{at_element<const T>(p.gate, row * p.gate_row_stride + first),
               at_element<const T>(p.up, row * p.up_row_stride + first)};
    const Out<T> to{at_element<T>(p.y, row * p.cols + col)};
    const bool streamed = p.stream_stores && is_aligned(to[0]);
    if (apart) {
      take_apart(from[0], n, in.gate, in.up);
      from = {in.gate, in.up};
    }
    for_whole_steps<T, 3, 3>(n, from, to, [&](int64_t offset, In<T> x, Out<T> y, int64_t count) {
      forward_steps<T>(f, x, y, count, streamed && offset == 0);
    });
  });
  if (p.stream_stores) stream_fence();
}

template <class T, class Function>
void backward(const Function& f, const GatedBackwardParams& p, int64_t begin, int64_t end) {
  const bool apart = p.interleaved;
  Blocks<T> in, out;
  for_rows(p.cols, begin, end, apart ? kBlock : end, [&](int64_t row, int64_t col, int64_t n) {
    const int64_t first = apart ? 2 * col : col;
    In<T> from{at_element<const T>(p.gate, row * p.gate_row_stride + first),
               at_element<const T>(p.up, row * p.up_row_stride + first),
               at_element<const T>(p.dy, row * p.dy_row_stride + col)};
    Out<T> to{at_element<T>(p.y, row * p.cols + col),
              at_element<T>(p.dgate, row * p.grad_row_stride + first),
              at_element<T>(p.dup, row * p.grad_row_stride + first)};
    T* const pairs = to[1];
    if (apart) {
      take_apart(from[0], n, in.gate, in.up);
      from = {in.gate, in.up, from[2]};
      to = {to[0], out.gate, out.up};
    }
    const bool streamed =
        p.stream_stores && is_aligned(to[0]) && (apart || (is_aligned(to[1]) && is_aligned(to[2])));
    for_whole_steps<T, 3, 3>(n, from, to, [&](int64_t offset, In<T> x, Out<T> y, int64_t count) {
      const bool past = streamed && offset == 0;
      backward_steps<T>(f, x, y, count, {.grads = past && !apart, .y = past});
    });
    if (apart) put_together(out.gate, out.up, n, pairs, p.stream_stores);
  });
  if (p.stream_stores) stream_fence();
}

}  // namespace

void gated_forward(const GatedForwardParams& p, int64_t begin, int64_t end) {
  with_type(p.dtype, [&](auto t) {
    with_activation(p.activation, [&](auto f) {
      forward<decltype(t)>(rounded_to<decltype(t)>(f), p, begin, end);
    });
  });
}

void gated_backward(const GatedBackwardParams& p, int64_t begin, int64_t end) {
  with_type(p.dtype, [&](auto t) {
    with_activation(p.activation, [&](auto f) {
      backward<decltype(t)>(rounded_to<decltype(t)>(f), p, begin, end);
    });
  });
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
