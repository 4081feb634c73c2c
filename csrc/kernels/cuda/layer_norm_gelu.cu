// GELU(LayerNorm(x)): LayerNorm's row kernels with GELU in the place of the identity.
#include "../layer_norm_gelu.h"

#include "launchers.h"
#include "layer_norm_backward.cuh"
#include "layer_norm_forward.cuh"

namespace memopt::kernels::cuda {

cudaError_t layer_norm_gelu_forward(const LayerNormGeluForwardParams& p, cudaStream_t stream) {
  return p.kind == GeluKind::kErf ? launch_layer_norm_forward<GeluErf>(p.norm, stream)
                                  : launch_layer_norm_forward<GeluTanh>(p.norm, stream);
}

cudaError_t layer_norm_gelu_backward(const LayerNormGeluBackwardParams& p, cudaStream_t stream) {
  return p.kind == GeluKind::kErf ? launch_layer_norm_backward<GeluErf>(p.norm, stream)
                                  : launch_layer_norm_backward<GeluTanh>(p.norm, stream);
}

}  // namespace memopt::kernels::cuda
