// activation_linear, gated_linear, gated_packed_linear: an activation or a gated unit in front of a
// linear.
//
// Saved: the activation's input, 2 bytes an element in bfloat16 (a gated unit's gate and up, 4).
// Eager PyTorch saves the activation's output as well, and of a gated unit f(gate) besides.
// Backward: linears.h.
#include <torch/library.h>

#include "activation_producers.h"
#include "linears.h"

namespace memopt::autograd {
namespace {

Tensor activation_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                         std::string_view activation) {
  return through_linears<ActivationProducer>({std::string(activation)}, {input},
                                             {{weight}, {value_or_undefined(bias)}})[0];
}

Tensor gated_linear(const Tensor& gate, const Tensor& up, const Tensor& weight,
                    const OptionalTensor& bias, std::string_view activation) {
  return through_linears<GatedProducer>({std::string(activation)}, {gate, up},
                                        {{weight}, {value_or_undefined(bias)}})[0];
}

Tensor gated_packed_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                           std::string_view activation, bool interleaved) {
  return through_linears<PackedProducer>({std::string(activation), interleaved}, {input},
                                         {{weight}, {value_or_undefined(bias)}})[0];
}

void register_ops(torch::Library& m) {
  m.impl("activation_linear", activation_linear);
  m.impl("gated_linear", gated_linear);
  m.impl("gated_packed_linear", gated_packed_linear);
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, Autograd, m) {
  register_ops(m);
}
TORCH_LIBRARY_IMPL(memopt, CompositeExplicitAutograd, m) {
  register_ops(m);
}

}  // namespace memopt::autograd
