// LayerNorm with GELU behind it: the row kernels with the activation put in.
#include "../layer_norm_gelu.h"

#include "norm_backward.h"
#include "norm_forward.h"
#include "table.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

void layer_norm_gelu_forward(const LayerNormGeluForwardParams& p, int64_t begin, int64_t end) {
  with_types(p.norm.dtype, p.norm.param_dtype, [&](auto t, auto g) {
    using T = decltype(t);
    using G = decltype(g);
    p.kind == GeluKind::kErf ? forward_rows<Norm<Centred, GeluErf>, T, G>(p.norm, begin, end)
                             : forward_rows<Norm<Centred, GeluTanh>, T, G>(p.norm, begin, end);
  });
}

void layer_norm_gelu_backward(const LayerNormGeluBackwardParams& p, int64_t begin, int64_t end) {
  with_types(p.norm.dtype, p.norm.param_dtype, [&](auto t, auto g) {
    using T = decltype(t);
    using G = decltype(g);
    p.kind == GeluKind::kErf ? backward_parts<Norm<Centred, GeluErf>, T, G>(p.norm, begin, end)
                             : backward_parts<Norm<Centred, GeluTanh>, T, G>(p.norm, begin, end);
  });
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
