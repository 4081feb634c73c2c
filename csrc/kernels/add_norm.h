// A residual added and the sum normalised, in one kernel each way: what stands between two branches
// of a pre-LN transformer block.
//
//   v = round(x + residual)          y = LayerNorm(v) or RMSNorm(v)
//   dv = dx of the norm at v + dsum  dx = dresidual = dv
//
// The sum is rounded once, to the tensors' type, and it is that rounded sum which is normalised: so
// both outputs have the bits of x + residual and the norm called one after the other. dsum is added
// before dv is rounded, which saves a rounding of the two steps.
//
// Memory, in elements: forward reads 2 and writes 2 where the two steps read 3 and write 2;
// backward reads 3 (v, dy, dsum) and writes 1 where they read 4 and write 2.
//
// Saved for backward: v, which the caller holds anyway (it is the residual stream), and the norm's
// statistics (8 bytes a row, 4 for RMSNorm). Recomputed: what the norm recomputes.
#pragma once

#include "layer_norm.h"
#include "rms_norm.h"
