// LayerNorm: the row kernels with nothing behind them, and the second step of the weight gradients
// (which layer_norm_gelu and add_layer_norm share).
#include "../layer_norm.h"

#include "norm_backward.h"
#include "norm_forward.h"
#include "table.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

void layer_norm_forward(const LayerNormForwardParams& p, int64_t begin, int64_t end) {
  with_types(p.dtype, p.param_dtype, [&](auto t, auto g) {
    forward_rows<Norm<Centred>, decltype(t), decltype(g)>(p, begin, end);
  });
}

void layer_norm_backward(const LayerNormBackwardParams& p, int64_t begin, int64_t end) {
  with_types(p.dtype, p.param_dtype, [&](auto t, auto g) {
    backward_parts<Norm<Centred>, decltype(t), decltype(g)>(p, begin, end);
  });
}

void layer_norm_reduce_parts(const LayerNormBackwardParams& p, int64_t begin, int64_t end) {
  with_types(p.dtype, p.param_dtype, [&](auto t, auto g) {
    using A = Accumulate<decltype(t)>;
    using G = decltype(g);
    reduce_parts<Norm<Centred>, A, G>(p, 0, p.dgamma, begin, end);
    reduce_parts<Norm<Centred>, A, G>(p, p.cols, p.dbeta, begin, end);
  });
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
