// GELU(LayerNorm(x)): LayerNorm's row kernels with GELU in the place of the identity.
#include "../layer_norm_gelu.h"

#include "launchers.h"
#include "norm_backward.cuh"
#include "norm_forward.cuh"

namespace memopt::kernels::cuda {

cudaError_t layer_norm_gelu_forward(const LayerNormGeluForwardParams& p, cudaStream_t stream) {
  return p.kind == GeluKind::kErf ? launch_norm_forward<Norm<Centred, GeluErf>>(p.norm, stream)
                                  : launch_norm_forward<Norm<Centred, GeluTanh>>(p.norm, stream);
}

cudaError_t layer_norm_gelu_backward(const LayerNormGeluBackwardParams& p, cudaStream_t stream) {
  return p.kind == GeluKind::kErf ? launch_norm_backward<Norm<Centred, GeluErf>>(p.norm, stream)
                                  : launch_norm_backward<Norm<Centred, GeluTanh>>(p.norm, stream);
}

}  // namespace memopt::kernels::cuda
