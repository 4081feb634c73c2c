// LayerNorm: the row kernels with nothing behind them, and the second step of the weight gradients
// (which layer_norm_gelu shares).
#include "../layer_norm.h"

#include "layer_norm_backward.h"
#include "layer_norm_forward.h"
#include "table.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

void layer_norm_forward(const LayerNormForwardParams& p, int64_t begin, int64_t end) {
  with_types(p.dtype, p.param_dtype, [&](auto t, auto g) {
    forward_rows<Identity, decltype(t), decltype(g)>(p, begin, end);
  });
}

void layer_norm_backward(const LayerNormBackwardParams& p, int64_t begin, int64_t end) {
  with_types(p.dtype, p.param_dtype, [&](auto t, auto g) {
    backward_parts<Identity, decltype(t), decltype(g)>(p, begin, end);
  });
}

namespace {

// One of the two gradients; `offset` is 0 for dgamma and cols for dbeta.
template <class A, class G>
void reduce_parts(const LayerNormBackwardParams& p, int64_t offset, void* out, int64_t begin,
                  int64_t end) {
  if (out == nullptr) return;
  using V = typename Elements<G>::V;
  const A* partials = static_cast<const A*>(p.partials) + offset + begin;
  for_steps<G>(0, end - begin, [&](int64_t i, auto extent) __attribute__((always_inline)) {
    Step<V> sum{V(0), V(0)};
    for (int64_t part = 0; part < p.parts; ++part) {
      const Step<V> v = load(partials + part * 2 * p.cols + i, extent);
      sum = {sum.lo + v.lo, sum.hi + v.hi};
    }
    store(static_cast<G*>(out) + begin + i, sum, extent);
  });
}

}  // namespace

void layer_norm_reduce_parts(const LayerNormBackwardParams& p, int64_t begin, int64_t end) {
  with_types(p.dtype, p.param_dtype, [&](auto t, auto g) {
    using A = Accumulate<decltype(t)>;
    using G = decltype(g);
    reduce_parts<A, G>(p, 0, p.dgamma, begin, end);
    reduce_parts<A, G>(p, p.cols, p.dbeta, begin, end);
  });
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
