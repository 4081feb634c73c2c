// LayerNorm: the row kernels with no activation behind them.
#include "../layer_norm.h"

#include "launchers.h"
#include "norm_backward.cuh"
#include "norm_forward.cuh"

namespace memopt::kernels::cuda {

cudaError_t layer_norm_forward(const LayerNormForwardParams& p, cudaStream_t stream) {
  return launch_norm_forward<Norm<Centred>>(p, stream);
}

cudaError_t layer_norm_backward(const LayerNormBackwardParams& p, cudaStream_t stream) {
  return launch_norm_backward<Norm<Centred>>(p, stream);
}

}  // namespace memopt::kernels::cuda
