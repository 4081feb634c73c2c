// The private operators: the forward and the backward that a public op is made of, below autograd.
// (Public ops are declared in autograd/, beside their nodes.) Not for users: their arguments may
// change. activation: a name in kernels/activation.h, and its scalar if it takes one.
//
// Results that were not asked for are undefined tensors (None in Python): of a backward, gradients
// that output_mask leaves out; of a forward, what only a backward reads, without for_backward.
// recompute_output asks for forward's output again.
//
// A name that ends in _: the result is written over the argument, for callers that own it.
// Backward's gradient is written over grad_output; another result may be the input itself.
#include <torch/library.h>

TORCH_LIBRARY(memopt, m) {
  m.def(
      "_activation_forward(Tensor input, *, str activation, float? activation_scalar=None)"
      " -> Tensor");
  m.def(
      "_activation_forward_(Tensor(a!) input, *, str activation, float? activation_scalar=None)"
      " -> ()");
  m.def(
      "_activation_backward(Tensor grad_output, Tensor input, *, str activation,"
      " float? activation_scalar=None, bool recompute_output=False)"
      " -> (Tensor grad_input, Tensor output)");
  m.def(
      "_activation_backward_(Tensor(a!) grad_output, Tensor input, *, str activation,"
      " float? activation_scalar=None, Tensor(b!)? output=None) -> ()");

  m.def(
      "_gated_forward(Tensor gate, Tensor up, *, str activation,"
      " float? activation_scalar=None) -> Tensor");
  m.def(
      "_gated_forward_(Tensor(a!) gate, Tensor up, *, str activation,"
      " float? activation_scalar=None) -> ()");
  m.def(
      "_gated_backward(Tensor grad_output, Tensor gate, Tensor? up, *, str activation,"
      " float? activation_scalar=None, bool[2] output_mask, bool recompute_output=False)"
      " -> (Tensor grad_gate, Tensor grad_up, Tensor output)");
  m.def(
      "_gated_backward_(Tensor(a!) grad_output, Tensor gate, Tensor up, *, str activation,"
      " float? activation_scalar=None, Tensor(b!)? grad_up=None, Tensor(c!)? output=None) -> ()");
  m.def(
      "_gated_packed_forward(Tensor input, *, str activation, float? activation_scalar=None,"
      " bool interleaved=False) -> Tensor");
  m.def(
      "_gated_packed_backward(Tensor grad_output, Tensor input, *, str activation,"
      " float? activation_scalar=None, bool interleaved=False, bool recompute_output=False)"
      " -> (Tensor grad_input, Tensor output)");

  // norm: "layer_norm" or "rms_norm", over the last normalized_dims dimensions; activation: behind
  // it, "gelu" or "gelu_tanh". x: the input, or its sum with the residual.
  m.def(
      "_norm_forward(Tensor input, Tensor? residual, int normalized_dims, Tensor? weight,"
      " Tensor? bias, float? eps, *, str norm, bool zero_centered_weight=False,"
      " str? activation=None, bool for_backward=True)"
      " -> (Tensor output, Tensor sum, Tensor mean, Tensor rstd)");
  m.def(
      "_norm_backward(Tensor grad_output, Tensor? grad_sum, Tensor x, int normalized_dims,"
      " Tensor? mean, Tensor rstd, Tensor? weight, Tensor? bias, bool[3] output_mask,"
      " bool recompute_output=False, *, str norm, bool zero_centered_weight=False,"
      " str? activation=None)"
      " -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias, Tensor output)");
  m.def(
      "_norm_backward_(Tensor(a!) grad_output, Tensor x, int normalized_dims, Tensor? mean,"
      " Tensor rstd, Tensor? weight, Tensor? bias, bool[2] output_mask,"
      " bool recompute_output=False, *, str norm, bool zero_centered_weight=False,"
      " str? activation=None) -> (Tensor grad_weight, Tensor grad_bias, Tensor output)");

  // Those that draw random numbers say so: no compiler may merge, repeat or drop their calls. They
  // draw a state [seed, offset] and return it, or take one and return none.
  const std::vector<at::Tag> random{at::Tag::nondeterministic_seeded};
  m.def(
      "_dropout_forward(Tensor input, float p, *, bool for_backward=True)"
      " -> (Tensor output, Tensor rng_state)",
      random);
  m.def("_dropout_backward(Tensor grad_output, Tensor rng_state, float p) -> Tensor grad_input");
  m.def(
      "_activation_dropout_forward(Tensor input, Tensor? rng_state, float p, *, str activation,"
      " float? activation_scalar=None, bool for_backward=True)"
      " -> (Tensor output, Tensor rng_state)",
      random);
  m.def(
      "_activation_dropout_backward(Tensor grad_output, Tensor input, Tensor rng_state, float p,"
      " *, str activation, float? activation_scalar=None, bool recompute_output=False)"
      " -> (Tensor grad_input, Tensor output)");
  m.def(
      "_dropout_add_norm_forward(Tensor input, Tensor residual, Tensor? rng_state, float p,"
      " int normalized_dims, Tensor? weight, Tensor? bias, float? eps, *, str norm,"
      " bool zero_centered_weight=False, bool for_backward=True)"
      " -> (Tensor output, Tensor sum, Tensor mean, Tensor rstd, Tensor rng_state)",
      random);
  m.def(
      "_dropout_add_norm_backward(Tensor grad_output, Tensor? grad_sum, Tensor sum,"
      " Tensor rng_state, float p, int normalized_dims, Tensor? mean, Tensor rstd,"
      " Tensor? weight, Tensor? bias, bool[4] output_mask, bool recompute_output=False, *,"
      " str norm, bool zero_centered_weight=False)"
      " -> (Tensor grad_input, Tensor grad_residual, Tensor grad_weight, Tensor grad_bias,"
      " Tensor output)");
}
