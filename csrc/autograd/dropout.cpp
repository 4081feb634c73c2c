// dropout: saves the state of its random numbers; draws the mask again from it.
//
//   grad_input = grad_output m        m_i = 0 or 1 / (1 - p), a function of the state and of i
//
// Saved: seed and offset, 16 bytes a call, as a tensor of input's device: a compiled graph carries
// them from forward to backward, and the host does not wait for them. (The CUDA allocator rounds
// them up to 512 bytes.)
//
// grad_input is linear in grad_output, with the same mask: the backward op is its own derivative,
// of any order.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <tuple>

#include "dropout.h"
#include "random.h"
#include "recipe.h"

namespace memopt::autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Public = Tensor(const Tensor&, double);
using Forward = std::tuple<Tensor, Tensor>(const Tensor&, double);
using Backward = Tensor(const Tensor&, const Tensor&, double);

const c10::TypedOperatorHandle<Backward>& backward_op() {
  static const auto op = find_op<Backward>("memopt::_dropout_backward");
  return op;
}

}  // namespace

std::tuple<Tensor, Tensor> dropout_forward(const Tensor& input, double p) {
  if (is_traced(input)) {
    const Tensor state = traced_state(input);
    return {backward_op().call(input, state, p), state};
  }
  static const auto op = find_op<Forward>("memopt::_dropout_forward");
  return op.call(input, p);
}

Tensor drop_again(const Tensor& tensor, const Tensor& state, double p) {
  return tensor.defined() ? backward_op().call(tensor, state, p) : Tensor();
}

namespace {

struct Dropout : torch::autograd::Function<Dropout> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, double p) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [output, state] = dropout_forward(input, p);
    ctx->save_for_backward({state});
    ctx->saved_data["p"] = p;
    remember(output, [&] {
      return Recipe{{input, state}, [p](const variable_list& saved) {
                      return backward_op().call(saved[0], saved[1], p);
                    }};
    });
    return output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor state = ctx->get_saved_variables()[0];
    return {backward_op().call(grads[0], state, ctx->saved_data["p"].toDouble()), Tensor()};
  }
};

// The mask of a given state: the derivative above, and that derivative's own.
struct Masked : torch::autograd::Function<Masked> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& state, double p) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({state});
    ctx->saved_data["p"] = p;
    return backward_op().call(input, state, p);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor state = ctx->get_saved_variables()[0];
    return {backward_op().call(grads[0], state, ctx->saved_data["p"].toDouble()), Tensor(),
            Tensor()};
  }
};

Tensor dropout(const Tensor& input, double p) {
  if (needs_node(input)) return Dropout::apply(input, p);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (is_traced(input)) return std::get<0>(dropout_forward(input, p));
  static const auto op = find_op<Public>("memopt::dropout");
  return op.call(input, p);
}

Tensor _dropout_backward(const Tensor& grad_output, const Tensor& state, double p) {
  if (needs_node(grad_output)) return Masked::apply(grad_output, state, p);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return backward_op().call(grad_output, state, p);
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, Autograd, m) {
  m.impl("dropout", dropout);
  m.impl("_dropout_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("_dropout_backward", _dropout_backward);
}

}  // namespace memopt::autograd
