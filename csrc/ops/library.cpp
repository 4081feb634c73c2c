// Every operator of memopt, once. Up to three per family: the public op, whose Autograd kernel is
// in autograd/, and the forward (where it computes more than the output) and backward that it is
// made of (below autograd; not public, their arguments may change). Results of a backward op that
// were not asked for are undefined tensors (None in Python).
#include <torch/library.h>

TORCH_LIBRARY(memopt, m) {
  m.def("gelu(Tensor input, *, str approximate=\"none\") -> Tensor");
  m.def("silu(Tensor input) -> Tensor");
  m.def("relu(Tensor input) -> Tensor");
  m.def("quick_gelu(Tensor input) -> Tensor");
  m.def("relu_squared(Tensor input) -> Tensor");
  m.def("sigmoid(Tensor input) -> Tensor");
  // activation: see ops/activation.h
  m.def("_activation_forward(Tensor input, *, str activation) -> Tensor");
  m.def(
      "_activation_backward(Tensor grad_output, Tensor input, *, str activation, bool "
      "recompute_output=False)"
      " -> (Tensor grad_input, Tensor output)");
  // A name that ends in _: the result is written over the argument, for callers that own it.
  // Backward's gradient is written over grad_output; `output` may be the input itself.
  m.def("_activation_forward_(Tensor(a!) input, *, str activation) -> ()");
  m.def(
      "_activation_backward_(Tensor(a!) grad_output, Tensor input, *, str activation,"
      " Tensor(b!)? output=None) -> ()");

  m.def("gated(Tensor gate, Tensor up, *, str activation) -> Tensor");
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("geglu(Tensor gate, Tensor up, *, str approximate=\"none\") -> Tensor");
  m.def(
      "_gated_backward(Tensor grad_output, Tensor gate, Tensor? up, *, str activation, bool[2] "
      "output_mask, bool recompute_output=False)"
      " -> (Tensor grad_gate, Tensor grad_up, Tensor output)");
  // grad_up may be up itself, output gate.
  m.def("_gated_forward_(Tensor(a!) gate, Tensor up, *, str activation) -> ()");
  m.def(
      "_gated_backward_(Tensor(a!) grad_output, Tensor gate, Tensor up, *, str activation,"
      " Tensor(b!)? grad_up=None, Tensor(c!)? output=None) -> ()");

  m.def("gated_packed(Tensor input, *, str activation, bool interleaved=False) -> Tensor");
  m.def("swiglu_packed(Tensor input, *, bool interleaved=False) -> Tensor");
  m.def(
      "geglu_packed(Tensor input, *, bool interleaved=False, str approximate=\"none\") -> Tensor");
  m.def(
      "_gated_packed_backward(Tensor grad_output, Tensor input, *, str activation, bool "
      "interleaved, bool recompute_output=False)"
      " -> (Tensor grad_input, Tensor output)");

  m.def(
      "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None,"
      " float eps=1e-05) -> Tensor");
  m.def(
      "_layer_norm_forward(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, "
      "float eps)"
      " -> (Tensor output, Tensor mean, Tensor rstd)");
  m.def(
      "_layer_norm_backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, Tensor "
      "mean, Tensor rstd,"
      " Tensor? weight, Tensor? bias, bool[3] output_mask, bool recompute_output=False)"
      " -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor output)");
  m.def(
      "_layer_norm_backward_(Tensor(a!) grad_output, Tensor input, SymInt[] normalized_shape,"
      " Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, bool[2] output_mask,"
      " bool recompute_output=False) -> (Tensor grad_weight, Tensor grad_bias, Tensor output)");

  m.def(
      "layer_norm_gelu(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? "
      "bias=None,"
      " float eps=1e-05, *, str approximate=\"none\") -> Tensor");
  m.def(
      "_layer_norm_gelu_forward(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? "
      "bias, float eps, *,"
      " str approximate) -> (Tensor output, Tensor mean, Tensor rstd)");
  m.def(
      "_layer_norm_gelu_backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, "
      "Tensor mean,"
      " Tensor rstd, Tensor? weight, Tensor? bias, bool[3] output_mask, bool "
      "recompute_output=False, *,"
      " str approximate) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor "
      "output)");

  m.def(
      "rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, *,"
      " bool zero_centered_weight=False) -> Tensor");
  m.def(
      "_rms_norm_forward(Tensor input, SymInt[] normalized_shape, Tensor? weight, float? eps, *,"
      " bool zero_centered_weight=False) -> (Tensor output, Tensor rstd)");
  m.def(
      "_rms_norm_backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, Tensor rstd,"
      " Tensor? weight, bool[2] output_mask, bool recompute_output=False, *,"
      " bool zero_centered_weight=False)"
      " -> (Tensor grad_input, Tensor grad_weight, Tensor output)");
  m.def(
      "_rms_norm_backward_(Tensor(a!) grad_output, Tensor input, SymInt[] normalized_shape,"
      " Tensor rstd, Tensor? weight, bool output_mask, bool recompute_output=False, *,"
      " bool zero_centered_weight=False) -> (Tensor grad_weight, Tensor output)");

  m.def(
      "add_layer_norm(Tensor input, Tensor residual, SymInt[] normalized_shape,"
      " Tensor? weight=None, Tensor? bias=None, float eps=1e-05) -> (Tensor output, Tensor sum)");
  m.def(
      "_add_layer_norm_forward(Tensor input, Tensor residual, SymInt[] normalized_shape,"
      " Tensor? weight, Tensor? bias, float eps)"
      " -> (Tensor output, Tensor sum, Tensor mean, Tensor rstd)");
  m.def(
      "_add_layer_norm_backward(Tensor grad_output, Tensor? grad_sum, Tensor sum,"
      " SymInt[] normalized_shape, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias,"
      " bool[3] output_mask, bool recompute_output=False)"
      " -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor output)");

  m.def(
      "add_rms_norm(Tensor input, Tensor residual, SymInt[] normalized_shape,"
      " Tensor? weight=None, float? eps=None, *, bool zero_centered_weight=False)"
      " -> (Tensor output, Tensor sum)");
  m.def(
      "_add_rms_norm_forward(Tensor input, Tensor residual, SymInt[] normalized_shape,"
      " Tensor? weight, float? eps, *, bool zero_centered_weight=False)"
      " -> (Tensor output, Tensor sum, Tensor rstd)");
  m.def(
      "_add_rms_norm_backward(Tensor grad_output, Tensor? grad_sum, Tensor sum,"
      " SymInt[] normalized_shape, Tensor rstd, Tensor? weight, bool[2] output_mask,"
      " bool recompute_output=False, *, bool zero_centered_weight=False)"
      " -> (Tensor grad_input, Tensor grad_weight, Tensor output)");
  // Those that draw random numbers say so: no compiler may merge, repeat or drop their calls.
  m.def("dropout(Tensor input, float p=0.5) -> Tensor", {at::Tag::nondeterministic_seeded});
  m.def("_dropout_forward(Tensor input, float p) -> (Tensor output, Tensor rng_state)",
        {at::Tag::nondeterministic_seeded});
  m.def("_dropout_backward(Tensor grad_output, Tensor rng_state, float p) -> Tensor grad_input");
  // These _forward ops draw a state and return it, or take one and return none.
  m.def("activation_dropout(Tensor input, float p=0.5, *, str activation) -> Tensor",
        {at::Tag::nondeterministic_seeded});
  m.def(
      "_activation_dropout_forward(Tensor input, Tensor? rng_state, float p, *, str activation)"
      " -> (Tensor output, Tensor rng_state)",
      {at::Tag::nondeterministic_seeded});
  m.def(
      "_activation_dropout_backward(Tensor grad_output, Tensor input, Tensor rng_state, float p, *,"
      " str activation, bool recompute_output=False) -> (Tensor grad_input, Tensor output)");
  m.def(
      "dropout_add_layer_norm(Tensor input, Tensor residual, float p, SymInt[] normalized_shape,"
      " Tensor? weight=None, Tensor? bias=None, float eps=1e-05) -> (Tensor output, Tensor sum)",
      {at::Tag::nondeterministic_seeded});
  m.def(
      "_dropout_add_layer_norm_forward(Tensor input, Tensor residual, Tensor? rng_state, float p,"
      " SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps)"
      " -> (Tensor output, Tensor sum, Tensor mean, Tensor rstd, Tensor rng_state)",
      {at::Tag::nondeterministic_seeded});
  m.def(
      "_dropout_add_layer_norm_backward(Tensor grad_output, Tensor? grad_sum, Tensor sum,"
      " Tensor rng_state, float p, SymInt[] normalized_shape, Tensor mean, Tensor rstd,"
      " Tensor? weight, Tensor? bias, bool[4] output_mask, bool recompute_output=False)"
      " -> (Tensor grad_input, Tensor grad_residual, Tensor grad_weight, Tensor grad_bias,"
      " Tensor output)");
  m.def(
      "dropout_add_rms_norm(Tensor input, Tensor residual, float p, SymInt[] normalized_shape,"
      " Tensor? weight=None, float? eps=None, *, bool zero_centered_weight=False)"
      " -> (Tensor output, Tensor sum)",
      {at::Tag::nondeterministic_seeded});
  m.def(
      "_dropout_add_rms_norm_forward(Tensor input, Tensor residual, Tensor? rng_state, float p,"
      " SymInt[] normalized_shape, Tensor? weight, float? eps, *,"
      " bool zero_centered_weight=False)"
      " -> (Tensor output, Tensor sum, Tensor rstd, Tensor rng_state)",
      {at::Tag::nondeterministic_seeded});
  m.def(
      "_dropout_add_rms_norm_backward(Tensor grad_output, Tensor? grad_sum, Tensor sum,"
      " Tensor rng_state, float p, SymInt[] normalized_shape, Tensor rstd, Tensor? weight,"
      " bool[3] output_mask, bool recompute_output=False, *, bool zero_centered_weight=False)"
      " -> (Tensor grad_input, Tensor grad_residual, Tensor grad_weight, Tensor output)");

  // Compositions of the ops above and linears; autograd/linears.h. A weight is [out, features].
  m.def(
      "layer_norm_linear(Tensor input, Tensor? norm_weight, Tensor? norm_bias, Tensor[] weights,"
      " Tensor?[] biases, float eps=1e-05) -> Tensor[]");
  m.def(
      "rms_norm_linear(Tensor input, Tensor? norm_weight, Tensor[] weights, Tensor?[] biases,"
      " float? eps=None, *, bool zero_centered_weight=False) -> Tensor[]");
  m.def(
      "activation_linear(Tensor input, Tensor weight, Tensor? bias=None, *, str activation)"
      " -> Tensor");
  m.def(
      "gated_linear(Tensor gate, Tensor up, Tensor weight, Tensor? bias=None, *, str activation)"
      " -> Tensor");
  m.def(
      "gated_packed_linear(Tensor input, Tensor weight, Tensor? bias=None, *, str activation,"
      " bool interleaved=False) -> Tensor");
  // up and down, and a gate where there is one: activation, norm ('none', 'layer_norm', 'rms_norm')
  // and recompute ('none', 'activations', 'all') by name; autograd/mlp.cpp.
  m.def(
      "mlp(Tensor input, Tensor up_weight, Tensor? up_bias, Tensor down_weight, Tensor? down_bias,"
      " Tensor? gate_weight=None, Tensor? gate_bias=None, Tensor? norm_weight=None,"
      " Tensor? norm_bias=None, *, str activation=\"gelu\", str norm=\"none\", float? eps=None,"
      " bool zero_centered_weight=False, float activation_dropout=0., float dropout=0.,"
      " bool residual=False, str recompute=\"activations\") -> Tensor",
      {at::Tag::nondeterministic_seeded});
}
