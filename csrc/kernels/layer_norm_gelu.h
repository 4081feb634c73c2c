// y = GELU(LayerNorm(x)) in one kernel each way: the normalised tensor z never exists in memory.
//
// Saved for backward: x (2 bytes an element in bfloat16), mean and rstd (8 bytes a row). Eager
// PyTorch saves x and z (4 bytes an element). Recomputed: xhat, z, and y where asked. The kernels
// are those of LayerNorm with GeluErf or GeluTanh in the place of Identity.
#pragma once

#include "gelu.h"
#include "layer_norm.h"

namespace memopt::kernels {

struct LayerNormGeluForwardParams {
  LayerNormForwardParams norm;
  GeluKind kind;
};

struct LayerNormGeluBackwardParams {
  LayerNormBackwardParams norm;
  GeluKind kind;
};

}  // namespace memopt::kernels
