// A residual added in front of a norm. Where the sum has no gradient of its own, backward is the
// norm's: layer_norm_backward, rms_norm_backward.
#include "../add_norm.h"

#include "launchers.h"
#include "norm_backward.cuh"
#include "norm_forward.cuh"

namespace memopt::kernels::cuda {
namespace {

template <class Statistics>
using AddNorm = Norm<Statistics, Identity, /*kAddsResidual=*/true>;

}  // namespace

cudaError_t add_layer_norm_forward(const NormForwardParams& p, cudaStream_t stream) {
  return launch_norm_forward<AddNorm<Centred>>(p, stream);
}

cudaError_t add_layer_norm_backward(const NormBackwardParams& p, cudaStream_t stream) {
  return launch_norm_backward<AddNorm<Centred>>(p, stream);
}

cudaError_t add_rms_norm_forward(const NormForwardParams& p, cudaStream_t stream) {
  return launch_norm_forward<AddNorm<RootMeanSquare>>(p, stream);
}

cudaError_t add_rms_norm_backward(const NormBackwardParams& p, cudaStream_t stream) {
  return launch_norm_backward<AddNorm<RootMeanSquare>>(p, stream);
}

}  // namespace memopt::kernels::cuda
