// An activation with dropout behind it, over a range of a contiguous array. Formulas:
// kernels/activation_dropout.h. Elements stay in their order within a step, as keep scales do.
#include "../activation_dropout.h"

#include "keep_scales.h"
#include "kernels.h"
#include "table.h"
#include "vec.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {
namespace {

template <class Function, class T>
void forward(const ActivationDropoutForwardParams& p, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(p.activation.x) + begin;
  T* y = static_cast<T*>(p.activation.y) + begin;
  const bool streamed = p.activation.stream_stores && is_aligned(y);
  KeepScales<T> scales(make_keeper<Accumulate<T>>(p.rule));
  for_steps<T>(0, end - begin, [&](int64_t i, auto extent) __attribute__((always_inline)) {
    const auto v = load(x + i, extent);
    const auto keep = scales.at(static_cast<uint64_t>(begin + i));
    const Step out{Function::value(v.lo) * keep.lo, Function::value(v.hi) * keep.hi};
    store(y + i, out, extent, streamed);
  });
  if (streamed) stream_fence();
}

template <class Function, class T>
void backward(const ActivationDropoutBackwardParams& p, int64_t begin, int64_t end) {
  const T* dy = static_cast<const T*>(p.activation.dy) + begin;
  const T* x = static_cast<const T*>(p.activation.x) + begin;
  T* dx = static_cast<T*>(p.activation.dx) + begin;
  T* y = p.activation.y ? static_cast<T*>(p.activation.y) + begin : nullptr;
  const bool streamed = p.activation.stream_stores && is_aligned(dx) && (!y || is_aligned(y));
  KeepScales<T> scales(make_keeper<Accumulate<T>>(p.rule));
  for_steps<T>(0, end - begin, [&](int64_t i, auto extent) __attribute__((always_inline)) {
    const auto v = load(x + i, extent);
    const auto d = load(dy + i, extent);
    const auto keep = scales.at(static_cast<uint64_t>(begin + i));
    const auto lo = Function::value_and_grad(v.lo);
    const auto hi = Function::value_and_grad(v.hi);
    store(dx + i,
          Step{chain<Function>(d.lo * keep.lo, lo.grad), chain<Function>(d.hi * keep.hi, hi.grad)},
          extent, streamed);
    if (y) store(y + i, Step{lo.value * keep.lo, hi.value * keep.hi}, extent, streamed);
  });
  if (streamed) stream_fence();
}

}  // namespace

void activation_dropout_forward(const ActivationDropoutForwardParams& p, int64_t begin,
                                int64_t end) {
  const ActivationForwardParams& a = p.activation;
  with_types(a.dtype, a.dtype, [&](auto t, auto) {
    with_activation(a.activation,
                    [&](auto f) { forward<decltype(f), decltype(t)>(p, begin, end); });
  });
}

void activation_dropout_backward(const ActivationDropoutBackwardParams& p, int64_t begin,
                                 int64_t end) {
  const ActivationBackwardParams& a = p.activation;
  with_types(a.dtype, a.dtype, [&](auto t, auto) {
    with_activation(a.activation,
                    [&](auto f) { backward<decltype(f), decltype(t)>(p, begin, end); });
  });
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
