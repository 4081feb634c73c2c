// Dropout in front of a residual and a norm, in one kernel each way: what stands between two
// branches of a pre-LN transformer block that is trained with dropout.
//
//   v = round(x m + residual)        y = LayerNorm(v) or RMSNorm(v)         m: dropout.h
//   dv = dx of the norm at v + dsum  dresidual = round(dv)  dx = round(dv m)
//
// x m is not rounded before it is added: v is fma(x, m, residual), rounded once to the tensors'
// type (on processors without a fused multiply-add the product is rounded to the type of sums
// before). It is that rounded v which is normalised: y has the bits of the norm called on v. dv is
// not rounded before it is multiplied by m. m is a function of row cols + col, the element's index
// in the contiguous tensor.
//
// Memory, in elements: forward reads 2 and writes 2, as without dropout (add_norm.h); backward
// reads 3 (v, dy, dsum) and writes 2. PyTorch's three steps read 5 and write 4 beside a mask, and
// read 6 and write 3.
//
// Saved for backward: v, which the caller holds anyway (it is the residual stream), the norm's
// statistics (8 bytes a row, 4 for RMSNorm), and seed and offset, 16 bytes a call. Neither x nor a
// mask.
#pragma once

#include "add_norm.h"
#include "dropout.h"
