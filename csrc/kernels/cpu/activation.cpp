// Activations forward and backward over a range of a dense array. Formulas: kernels/activation.h.
#include "../activation.h"

#include "kernels.h"
#include "table.h"
#include "vec.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {
namespace {

template <class Function, class T>
void forward(const ActivationForwardParams& p, int64_t begin, int64_t end) {
  using E = UnorderedElements<T>;
  const T* x = static_cast<const T*>(p.x) + begin;
  T* y = static_cast<T*>(p.y) + begin;
  const bool streamed = p.stream_stores && is_aligned(y);
  for_steps<T>(0, end - begin, [&](int64_t i, auto extent) __attribute__((always_inline)) {
    const auto v = load<E>(x + i, extent);
    store<E>(y + i, Step{Function::value(v.lo), Function::value(v.hi)}, extent, streamed);
  });
  if (streamed) stream_fence();
}

template <class Function, class T>
void backward(const ActivationBackwardParams& p, int64_t begin, int64_t end) {
  using E = UnorderedElements<T>;
  const T* dy = static_cast<const T*>(p.dy) + begin;
  const T* x = static_cast<const T*>(p.x) + begin;
  T* dx = static_cast<T*>(p.dx) + begin;
  T* y = p.y ? static_cast<T*>(p.y) + begin : nullptr;
  const bool streamed = p.stream_stores && is_aligned(dx) && (!y || is_aligned(y));
  for_steps<T>(0, end - begin, [&](int64_t i, auto extent) __attribute__((always_inline)) {
    const auto v = load<E>(x + i, extent);
    const auto d = load<E>(dy + i, extent);
    const auto lo = Function::value_and_grad(v.lo);
    const auto hi = Function::value_and_grad(v.hi);
    store<E>(dx + i, Step{chain<Function>(d.lo, lo.grad), chain<Function>(d.hi, hi.grad)}, extent,
             streamed);
    if (y) store<E>(y + i, Step{lo.value, hi.value}, extent, streamed);
  });
  if (streamed) stream_fence();
}

}  // namespace

void activation_forward(const ActivationForwardParams& p, int64_t begin, int64_t end) {
  with_types(p.dtype, p.dtype, [&](auto t, auto) {
    with_activation(p.activation,
                    [&](auto f) { forward<decltype(f), decltype(t)>(p, begin, end); });
  });
}

void activation_backward(const ActivationBackwardParams& p, int64_t begin, int64_t end) {
  with_types(p.dtype, p.dtype, [&](auto t, auto) {
    with_activation(p.activation,
                    [&](auto f) { backward<decltype(f), decltype(t)>(p, begin, end); });
  });
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
