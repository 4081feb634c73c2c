// Dropout and a residual in front of a norm. Where the gradient of what is dropped is not wanted,
// backward is that of add_norm.cu.
//
// Memory: forward as add_norm.cu; backward writes 2 bytes an element more, in 2-byte types, and
// reads no mask. The numbers are drawn where x is loaded and again where its gradient is stored: 8
// instructions an element in rows of whole vectors, 60 where elements move one by one.
#include "../dropout_add_norm.h"

#include "launchers.h"
#include "norm_backward.cuh"
#include "norm_forward.cuh"

namespace memopt::kernels::cuda {
namespace {

template <class Statistics>
using DropoutAddNorm = Norm<Statistics, Identity, /*kAddsResidual=*/true, /*kDropsInput=*/true>;

}  // namespace

cudaError_t dropout_add_layer_norm_forward(const NormForwardParams& p, cudaStream_t stream) {
  return launch_norm_forward<DropoutAddNorm<Centred>>(p, stream);
}

cudaError_t dropout_add_layer_norm_backward(const NormBackwardParams& p, cudaStream_t stream) {
  return launch_norm_backward<DropoutAddNorm<Centred>>(p, stream);
}

cudaError_t dropout_add_rms_norm_forward(const NormForwardParams& p, cudaStream_t stream) {
  return launch_norm_forward<DropoutAddNorm<RootMeanSquare>>(p, stream);
}

cudaError_t dropout_add_rms_norm_backward(const NormBackwardParams& p, cudaStream_t stream) {
  return launch_norm_backward<DropoutAddNorm<RootMeanSquare>>(p, stream);
}

}  // namespace memopt::kernels::cuda
