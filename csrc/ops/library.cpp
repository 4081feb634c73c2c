// Every operator of memopt, once. Three per family: the public op, whose Autograd kernel is in
// autograd/, and the forward and backward that it is made of (below autograd; not public, their
// arguments may change). Results of a backward op that were not asked for are undefined tensors
// (None in Python).
#include <torch/library.h>

TORCH_LIBRARY(memopt, m) {
  m.def("gelu(Tensor input, *, str approximate=\"none\") -> Tensor");
  m.def("_gelu_forward(Tensor input, *, str approximate) -> Tensor");
  m.def(
      "_gelu_backward(Tensor grad_output, Tensor input, *, str approximate, bool "
      "recompute_output=False)"
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
}
