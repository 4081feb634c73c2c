// Gated units: y = f(gate) up element by element, f an activation (Shazeer, arXiv:2002.05202;
// SwiGLU with silu, GEGLU with gelu).
//
//   dgate = dy up f'(gate)        dup = dy f(gate)
//
// Saved for backward: gate and up, 4 bytes an element of y in bfloat16; eager PyTorch saves f(gate)
// as well, 6. Recomputed: f(gate), and y where asked: value_and_grad() gives it beside the
// derivative for one more multiplication.
//
// gate and up are two tensors, or the halves of one, or alternate in one (gate 0, up 0, gate 1, up
// 1, ...): the kernels take rows with strides, so nothing is copied, and backward writes the
// gradients where they belong.
#pragma once

#include "activation.h"

namespace memopt::kernels {

// Rows of `cols` elements of y. Strides are in elements; y is contiguous.
struct GatedForwardParams {
  const void* gate;
  const void* up;  // gate's second element if interleaved
  void* y;
  int64_t rows;
  int64_t cols;
  int64_t gate_row_stride;
  int64_t up_row_stride;
  bool interleaved;  // gate's and up's elements lie two apart, else one
  ScalarType dtype;
  ActivationSpec activation;
  bool stream_stores;
};

struct GatedBackwardParams {
  const void* dy;
  const void* gate;
  const void* up;  // may be null if dgate and y are
  void* dgate;     // null if not wanted, else may be dy itself if that has dgate's stride
  void* dup;       // null if not wanted
  void* y;         // null, or f(gate) up is re-emitted here, in the same bits as forward wrote
  int64_t rows;
  int64_t cols;
  int64_t dy_row_stride;
  int64_t gate_row_stride;
  int64_t up_row_stride;
  int64_t grad_row_stride;  // of dgate and dup
  bool interleaved;         // gate and up, and so dgate and dup, of which then neither is null
  ScalarType dtype;
  ActivationSpec activation;
  bool stream_stores;
};

template <class V>
struct GatedGrad {
  V dgate;
  V dup;
  V y;
};

template <class Function, class V>
MEMOPT_HD V gated_value(const Function& f, V gate, V up) {
  return f.value(gate) * up;
}

template <class Function, class V>
MEMOPT_HD GatedGrad<V> gated_grad(const Function& f, V dy, V gate, V up) {
  const ValueGrad<V> at_gate = f.value_and_grad(gate);
  return {chain<Function>(dy * up, at_gate.grad), dy * at_gate.value, at_gate.value * up};
}

}  // namespace memopt::kernels
