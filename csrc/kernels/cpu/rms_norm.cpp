// RMSNorm: the row kernels with its statistics, and the second step of the weight gradient (which
// add_rms_norm shares).
#include "../rms_norm.h"

#include "norm_backward.h"
#include "norm_forward.h"
#include "table.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

void rms_norm_forward(const NormForwardParams& p, int64_t begin, int64_t end) {
  with_types(p.dtype, p.param_dtype, [&](auto t, auto g) {
    forward_rows<Norm<RootMeanSquare>, decltype(t), decltype(g)>(p, begin, end);
  });
}

void rms_norm_backward(const NormBackwardParams& p, int64_t begin, int64_t end) {
  with_types(p.dtype, p.param_dtype, [&](auto t, auto g) {
    backward_parts<Norm<RootMeanSquare>, decltype(t), decltype(g)>(p, begin, end);
  });
}

void rms_norm_reduce_parts(const NormBackwardParams& p, int64_t begin, int64_t end) {
  with_types(p.dtype, p.param_dtype, [&](auto t, auto g) {
    using A = Accumulate<decltype(t)>;
    reduce_parts<Norm<RootMeanSquare>, A, decltype(g)>(p, 0, p.dgamma, begin, end);
  });
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
