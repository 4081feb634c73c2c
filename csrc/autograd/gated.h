// Gradients of the gated units by PyTorch's differentiable ops: what create_graph=True composes.
#pragma once

#include <array>
#include <string_view>

#include "support.h"

namespace memopt::autograd {

// `name` is the activation's.
Tensor composed_grad_gate(std::string_view name, const Tensor& grad, const Tensor& gate,
                          const Tensor& up);
Tensor composed_grad_up(std::string_view name, const Tensor& grad, const Tensor& gate);
Tensor composed_packed_grad(std::string_view name, const Tensor& grad, const Tensor& input,
                            bool interleaved);

// Views of gate and up in a packed tensor.
std::array<Tensor, 2> packed_halves(const Tensor& input, bool interleaved);

}  // namespace memopt::autograd
