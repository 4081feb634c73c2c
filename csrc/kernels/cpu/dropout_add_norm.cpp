// Dropout and a residual in front of a norm. Where the gradient of what is dropped is not wanted,
// backward is that of add_norm.cpp.
#include "../dropout_add_norm.h"

#include "norm_backward.h"
#include "norm_forward.h"
#include "table.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {
namespace {

template <class Statistics>
using DropoutAddNorm = Norm<Statistics, Identity, /*kAddsResidual=*/true, /*kDropsInput=*/true>;

template <class Statistics>
void forward(const NormForwardParams& p, int64_t begin, int64_t end) {
  with_types(p.dtype, p.param_dtype, [&](auto t, auto g) {
    forward_rows<DropoutAddNorm<Statistics>, decltype(t), decltype(g)>(p, begin, end);
  });
}

template <class Statistics>
void backward(const NormBackwardParams& p, int64_t begin, int64_t end) {
  with_types(p.dtype, p.param_dtype, [&](auto t, auto g) {
    backward_parts<DropoutAddNorm<Statistics>, decltype(t), decltype(g)>(p, begin, end);
  });
}

}  // namespace

void dropout_add_layer_norm_forward(const NormForwardParams& p, int64_t begin, int64_t end) {
  forward<Centred>(p, begin, end);
}

void dropout_add_layer_norm_backward(const NormBackwardParams& p, int64_t begin, int64_t end) {
  backward<Centred>(p, begin, end);
}

void dropout_add_rms_norm_forward(const NormForwardParams& p, int64_t begin, int64_t end) {
  forward<RootMeanSquare>(p, begin, end);
}

void dropout_add_rms_norm_backward(const NormBackwardParams& p, int64_t begin, int64_t end) {
  backward<RootMeanSquare>(p, begin, end);
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
