#include "dropout.h"

#include <tuple>

#include "declare.h"
#include "random.h"
#include "run.h"

namespace memopt::autograd {
namespace {

const c10::TypedOperatorHandle<Tensor(const Tensor&, const Tensor&, double)>& backward_op() {
  static const auto op = MEMOPT_PRIVATE_OP(_dropout_backward);
  return op;
}

}  // namespace

Tensor drop_again(const Tensor& tensor, const Tensor& state, double p) {
  return tensor.defined() ? backward_op().call(tensor, state, p) : Tensor();
}

Produced DropoutOp::forward(const Options& o, const variable_list& in, bool for_backward) {
  if (is_traced(in[0])) {
    const Tensor state = traced_state(in[0]);
    return {backward_op().call(in[0], state, o.p), in, {state}, {}};
  }
  static const auto op = MEMOPT_PRIVATE_OP(_dropout_forward);
  const auto [output, state] = op.call(in[0], o.p, for_backward);
  return {output, in, {state}, {}};
}

Tensor DropoutOp::forward_again(const Options& o, const variable_list& reads,
                                const variable_list& extras) {
  return backward_op().call(reads[0], extras[0], o.p);
}

Reproduced DropoutOp::backward(const Options& o, const variable_list&, const variable_list& extras,
                               const variable_list& grads, const Request&) {
  return {{drop_again(grads[0], extras[0], o.p)}, Tensor()};
}

variable_list DropoutOp::differentiable_backward(const Options& o, const variable_list&,
                                                 const variable_list& extras,
                                                 const variable_list& grads, const Wanted&) {
  return {drop_again(grads[0], extras[0], o.p)};
}

Tensor DropoutOp::differentiable_forward(const Options& o, const variable_list& reads,
                                         const variable_list& extras) {
  return drop_again(reads[0], extras[0], o.p);
}

namespace {

// Applies the mask of a given state: dropout's derivative, which is its own derivative too.
struct Masked {
  double p = 0.0;

  template <class Function, class F>
  static void visit(Function& function, F&& f) {
    f(function.p);
  }

  variable_list backward(const variable_list& saved, const variable_list& grads,
                         const Wanted& /*wanted*/) const {
    return {drop_again(grads[0], saved[0], p)};
  }
};

Tensor masked(const Tensor& input, const Tensor& state, double p) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return backward_op().call(input, state, p);
}

Tensor dropout(const Tensor& input, double p) {
  return run<DropoutOp>("dropout", {p}, {input})[0];
}

Tensor _dropout_backward(const Tensor& grad_output, const Tensor& state, double p) {
  if (!needs_node("dropout backward", grad_output)) return masked(grad_output, state, p);
  const auto node = make_node(Masked{p});
  node->set_arguments(grad_output);
  Tensor output = masked(grad_output, state, p);
  node->add_output(output);
  node->save({state});
  return output;
}

MEMOPT_DECLARE(dropout, {}, kDrawsRandomNumbers, "dropout(Tensor input, float p=0.5) -> Tensor");

}  // namespace

TORCH_LIBRARY_IMPL(memopt, Autograd, m) {
  m.impl("_dropout_backward", _dropout_backward);
}

}  // namespace memopt::autograd
