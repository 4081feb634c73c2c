"""Dropout without masks, alone, behind an activation, and in front of a residual and a norm."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from memopt._extension import ops
from memopt.functional.activation import ACTIVATIONS, gelu_name
from memopt.functional.activation import activation as activate
from memopt.functional.arguments import as_ints, names_arguments
from memopt.functional.norm import add_layer_norm, add_rms_norm


@names_arguments
def dropout(input: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Zeroes elements at random, each with probability p, and divides the others by 1 - p.

    Which ones is a function of a seed and of the element's index, which counts elements in the
    order of their indices (row-major), whatever input's strides: no mask is stored. Saves for
    backward: seed and offset, 16 bytes a call. They come from the default generator of input's
    device, so torch.manual_seed and checkpoints replay them; the mask depends on nothing else, not
    on dtype, threads or device properties. p is met to 2^-17. Source: Srivastava et al., JMLR 15
    (2014); the numbers are Philox4x32-10's (Salmon et al., SC'11).

    Autocast leaves the dtype alone, as it does for PyTorch's dropout.

    On CUDA a compiled graph draws its state by an op of PyTorch's, so for one seed its mask is not
    eager's; and eager calls cannot be captured in a CUDA graph (the generator says so).

    Args:
        input: any shape. Zeroed elements are multiplied by 0: infinities and NaN become NaN, as in
            PyTorch.
        p: the probability of zeroing an element, from 0 to 1. Default 0.5.
        training: False returns input itself, and so does p = 0: no copy, nothing drawn.

    Returns:
        A tensor of input's shape and dtype, in its memory order: dense strides are kept. (For input
        that is not contiguous that takes a copy to number the elements, and one back.)

    Raises:
        ValueError: p is not between 0 and 1.
        RuntimeError: an unsupported dtype, device or layout.
    """
    if not _drops("dropout", p, training):
        return input
    output: Tensor = ops.dropout(input, p)
    return output


@names_arguments
def activation_dropout(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    activation: str = "gelu",
    activation_scalar: float | None = None,
) -> Tensor:
    """dropout(f(input)) for an activation f, in one kernel each way: f(input) never exists in
    memory, and is not rounded before it is dropped or scaled.

    Saves for backward: input, and 16 bytes a call. Numbers and mask as for dropout.

    Args:
        input: any shape.
        p: the probability of zeroing an element, from 0 to 1. Default 0.5.
        training: False returns f(input), of input's memory layout, and so does p = 0: nothing is
            drawn.
        activation: as for memopt.functional.activation. Default "gelu".
        activation_scalar: likewise. Default None.

    Returns:
        A tensor of input's shape and dtype, in its memory order, as from dropout.

    Raises:
        ValueError: p is not between 0 and 1.
        RuntimeError: an unsupported dtype, device or layout, or another `activation`.
    """
    # The op's error names the op, where the name is unknown.
    if not _drops("activation_dropout", p, training) and activation in ACTIVATIONS:
        return activate(input, activation, activation_scalar)
    output: Tensor = ops.activation_dropout(
        input, p, activation=activation, activation_scalar=activation_scalar
    )
    return output


@names_arguments
def gelu_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, approximate: str = "none"
) -> Tensor:
    """dropout(gelu(input)) in one kernel each way: activation_dropout with GELU.

    Args:
        input, p, training: as for activation_dropout.
        approximate: as for gelu.

    Raises:
        ValueError: p is not between 0 and 1.
        RuntimeError: an unsupported dtype, device or layout, or another `approximate`.
    """
    name = gelu_name("gelu_dropout", approximate)
    if not _drops("gelu_dropout", p, training):
        return activate(input, name)
    return activation_dropout(input, p, training, name)


@names_arguments
def dropout_add_layer_norm(
    input: Tensor,
    residual: Tensor,
    p: float,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    training: bool = True,
) -> tuple[Tensor, Tensor]:
    """dropout(input) + residual, and its layer_norm, in one kernel each way.

    What is dropped or scaled is not rounded before it is added. Saves for backward: the sum, which
    is returned (so it must not change in place before backward), 8 bytes a row and 16 bytes a call;
    neither input nor a mask. Numbers and mask as for dropout; under autocast as for add_layer_norm.

    Args:
        input: (*, *normalized_shape): what is dropped.
        residual: input's shape and dtype.
        p: the probability of zeroing an element of input, from 0 to 1.
        normalized_shape, weight, bias, eps: as for layer_norm.
        training: False is add_layer_norm, and so is p = 0: nothing is drawn.

    Returns:
        (output, sum): the normalised sum, and the sum, of input's shape and dtype and with the
        strides that add_layer_norm gives them.

    Raises:
        ValueError: p is not between 0 and 1.
        RuntimeError: an argument breaks another rule above; the message names it and what was got.
    """
    if not _drops("dropout_add_layer_norm", p, training):
        return add_layer_norm(input, residual, normalized_shape, weight, bias, eps)
    output, sum = ops.dropout_add_layer_norm(
        input, residual, p, as_ints(normalized_shape), weight, bias, eps
    )
    return output, sum


@names_arguments
def dropout_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    p: float,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    training: bool = True,
    *,
    zero_centered_weight: bool = False,
) -> tuple[Tensor, Tensor]:
    """dropout(input) + residual, and its rms_norm, in one kernel each way: dropout_add_layer_norm
    with rms_norm.

    Saves for backward: the sum, which is returned, 4 bytes a row and 16 bytes a call.

    Args:
        input, residual, p: as for dropout_add_layer_norm.
        normalized_shape, weight, eps, zero_centered_weight: as for rms_norm.
        training: False is add_rms_norm, and so is p = 0: nothing is drawn.

    Returns:
        (output, sum): the normalised sum, and the sum, of input's shape and dtype and with the
        strides that add_layer_norm gives them.

    Raises:
        ValueError: p is not between 0 and 1.
        RuntimeError: an argument breaks another rule above; the message names it and what was got.
    """
    keywords = {"zero_centered_weight": zero_centered_weight}
    if not _drops("dropout_add_rms_norm", p, training):
        return add_rms_norm(input, residual, normalized_shape, weight, eps, **keywords)
    output, sum = ops.dropout_add_rms_norm(
        input, residual, p, as_ints(normalized_shape), weight, eps, **keywords
    )
    return output, sum


def _drops(op: str, p: float, training: bool) -> bool:
    """Whether anything may be dropped; p is checked."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{op}: p must be between 0 and 1, got {p}")
    return training and p != 0.0
