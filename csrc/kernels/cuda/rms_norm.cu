// RMSNorm: the row kernels with its statistics.
#include "../rms_norm.h"

#include "launchers.h"
#include "norm_backward.cuh"
#include "norm_forward.cuh"

namespace memopt::kernels::cuda {

cudaError_t rms_norm_forward(const NormForwardParams& p, cudaStream_t stream) {
  return launch_norm_forward<Norm<RootMeanSquare>>(p, stream);
}

cudaError_t rms_norm_backward(const NormBackwardParams& p, cudaStream_t stream) {
  return launch_norm_backward<Norm<RootMeanSquare>>(p, stream);
}

}  // namespace memopt::kernels::cuda
