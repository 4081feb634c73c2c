// Activations forward and backward over a range of a dense array, with dropout behind them if
// asked. Formulas: kernels/activation.h.
#include "../activation.h"

#include <algorithm>
#include <array>

#include "keep_scales.h"
#include "kernels.h"
#include "rounded_to.h"
#include "table.h"
#include "vec.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {
namespace {

template <class T>
using In = std::array<const T*, 2>;  // x, dy
template <class T>
using Out = std::array<T*, 2>;  // y, dx

// Whole steps; keep: null, or what each element is multiplied by.
template <class T, class Function>
__attribute__((noinline)) void forward_steps(const Function f, const Accumulate<T>* keep, In<T> in,
                                             Out<T> out, int64_t count, bool streamed) {
  using E = UnorderedElements<T>;
  const T* const x = in[0];
  T* const y = out[0];
  for (int64_t i = 0; i < count; i += E::kStep) {
    const auto v = E::load(x + i);
    Step value{f.value(v.lo), f.value(v.hi)};
    if (keep != nullptr) {
      const auto k = E::arrange(load_keep<T>(keep + i));
      value = {value.lo * k.lo, value.hi * k.hi};
    }
    store<E>(y + i, value, Whole{}, streamed);
  }
}

template <class T, class Function>
__attribute__((noinline)) void backward_steps(const Function f, const Accumulate<T>* keep, In<T> in,
                                              Out<T> out, int64_t count, bool streamed) {
  using E = UnorderedElements<T>;
  const auto [x, dy] = in;
  const auto [y, dx] = out;
  for (int64_t i = 0; i < count; i += E::kStep) {
    const auto v = E::load(x + i);
    auto d = E::load(dy + i);
    const auto lo = f.value_and_grad(v.lo);
    const auto hi = f.value_and_grad(v.hi);
    const auto k = keep == nullptr ? d : E::arrange(load_keep<T>(keep + i));  // d: not read
    if (keep != nullptr) d = {d.lo * k.lo, d.hi * k.hi};
    store<E>(dx + i, Step{chain<Function>(d.lo, lo.grad), chain<Function>(d.hi, hi.grad)}, Whole{},
             streamed);
    if (y) {
      // Asked for here alone, so that it is not computed where nobody wants it.
      Step value{f.value_and_grad(v.lo).value, f.value_and_grad(v.hi).value};
      if (keep != nullptr) value = {value.lo * k.lo, value.hi * k.hi};
      store<E>(y + i, value, Whole{}, streamed);
    }
  }
}

// steps(keep, in, out, count, streamed) over the elements [first, last) of the arrays, with dropout
// by blocks.
template <class T, class Params, class Steps>
void for_elements(const Params& p, In<T> in, Out<T> out, int64_t first, int64_t last,
                  Steps&& steps) {
  using A = Accumulate<T>;
  const auto from = [&](auto* array, int64_t i) { return array ? array + i : array; };
  const auto run = [&](int64_t i, int64_t count, const A* keep) {
    const Out<T> to{from(out[0], i), from(out[1], i)};
    const bool streamed = p.stream_stores && is_aligned(to[0]) && is_aligned(to[1]);
    for_whole_steps<T, 2, 2>(count, {from(in[0], i), from(in[1], i)}, to,
                             [&](int64_t offset, In<T> x, Out<T> y, int64_t n) {
                               steps(keep ? keep + offset : keep, x, y, n, streamed && offset == 0);
                             });
  };
  if (!p.drops) {
    run(first, last - first, nullptr);
  } else {
    KeepScales<T> scales(make_keeper<A>(p.rule));
    for (int64_t i = first; i < last; i += kKeepBlock) {
      const int64_t count = std::min(kKeepBlock, last - i);
      run(i, count, scales.at(static_cast<uint64_t>(i), count));
    }
  }
  if (p.stream_stores) stream_fence();
}

template <class T, class Function>
void forward(const Function& f, const ActivationForwardParams& p, int64_t first, int64_t last) {
  for_elements<T>(p, {static_cast<const T*>(p.x), nullptr}, {static_cast<T*>(p.y), nullptr}, first,
                  last, [&](auto... arguments) { forward_steps<T>(f, arguments...); });
}

template <class T, class Function>
void backward(const Function& f, const ActivationBackwardParams& p, int64_t first, int64_t last) {
  for_elements<T>(p, {static_cast<const T*>(p.x), static_cast<const T*>(p.dy)},
                  {static_cast<T*>(p.y), static_cast<T*>(p.dx)}, first, last,
                  [&](auto... arguments) { backward_steps<T>(f, arguments...); });
}

}  // namespace

void activation_forward(const ActivationForwardParams& p, int64_t begin, int64_t end) {
  with_type(p.dtype, [&](auto t) {
    with_activation(p.activation, [&](auto f) {
      forward<decltype(t)>(rounded_to<decltype(t)>(f), p, begin, end);
    });
  });
}

void activation_backward(const ActivationBackwardParams& p, int64_t begin, int64_t end) {
  with_type(p.dtype, [&](auto t) {
    with_activation(p.activation, [&](auto f) {
      backward<decltype(t)>(rounded_to<decltype(t)>(f), p, begin, end);
    });
  });
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
