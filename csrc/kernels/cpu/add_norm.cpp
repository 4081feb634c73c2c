// A residual added in front of a norm. Where the sum has no gradient of its own, backward is the
// norm's: layer_norm_backward, rms_norm_backward.
#include "../add_norm.h"

#include "norm_backward.h"
#include "norm_forward.h"
#include "table.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {
namespace {

template <class Statistics>
using AddNorm = Norm<Statistics, Identity, /*kAddsResidual=*/true>;

template <class Statistics>
void forward(const NormForwardParams& p, int64_t begin, int64_t end) {
  with_types(p.dtype, p.param_dtype, [&](auto t, auto g) {
    forward_rows<AddNorm<Statistics>, decltype(t), decltype(g)>(p, begin, end);
  });
}

template <class Statistics>
void backward(const NormBackwardParams& p, int64_t begin, int64_t end) {
  with_types(p.dtype, p.param_dtype, [&](auto t, auto g) {
    backward_parts<AddNorm<Statistics>, decltype(t), decltype(g)>(p, begin, end);
  });
}

}  // namespace

void add_layer_norm_forward(const NormForwardParams& p, int64_t begin, int64_t end) {
  forward<Centred>(p, begin, end);
}

void add_layer_norm_backward(const NormBackwardParams& p, int64_t begin, int64_t end) {
  backward<Centred>(p, begin, end);
}

void add_rms_norm_forward(const NormForwardParams& p, int64_t begin, int64_t end) {
  forward<RootMeanSquare>(p, begin, end);
}

void add_rms_norm_backward(const NormBackwardParams& p, int64_t begin, int64_t end) {
  backward<RootMeanSquare>(p, begin, end);
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
