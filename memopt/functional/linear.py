"""Linears behind an op whose output backward recomputes, so that it is not stored.

Each has the outputs and gradients, bit for bit, of the op in the first part of its name followed by
torch.nn.functional.linear. It saves for backward only what that first op saves. Backward runs the
input-gradient product, then one kernel that writes both the op's gradient and its output, then the
weight-gradient products. Nothing is computed for gradients that are not asked for. Under autocast
input and weights are cast to the autocast dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor
from torch.nn.functional import linear

from memopt._compat import in_jit_trace
from memopt._extension import ops
from memopt.functional.activation import gelu_name
from memopt.functional.arguments import names_arguments
from memopt.functional.norm import layer_norm, rms_norm

Tensors = Sequence[Tensor]
OptionalTensors = Sequence[Tensor | None]


@overload
def layer_norm_linear(
    input: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor: ...
@overload
def layer_norm_linear(
    input: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensors,
    bias: OptionalTensors | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, ...]: ...
@names_arguments
def layer_norm_linear(
    input: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor | Tensors,
    bias: Tensor | OptionalTensors | None = None,
    eps: float = 1e-5,
) -> Tensor | tuple[Tensor, ...]:
    """layer_norm over the last dimension, then one linear or several that share its output.

    Saves for backward: input and 8 bytes a row. The norm's output is written once in forward and
    once in backward, however many linears read it (separate query, key and value, say).

    Args:
        input: (*, features).
        norm_weight, norm_bias: (features,), of input's dtype or float32; None for 1 and 0.
        weight: (out, features), or a sequence of such.
        bias: (out,), or a sequence as long as weight's with None where there is none.
        eps: added to the variance, at least 0. Default 1e-5.

    Returns:
        (*, out); for a sequence of weights a tuple of such.

    Raises:
        RuntimeError: an argument breaks a rule above; the message names it and what was got.
    """
    weights, biases = _as_lists(weight, bias)
    if not torch.compiler.is_compiling() and in_jit_trace():
        normed = layer_norm(input, [int(input.shape[-1])], norm_weight, norm_bias, eps)
        return _traced(normed, weight, weights, biases)
    outputs = ops.layer_norm_linear(input, norm_weight, norm_bias, weights, biases, eps)
    return outputs[0] if isinstance(weight, Tensor) else tuple(outputs)


@overload
def rms_norm_linear(
    input: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centered_weight: bool = False,
) -> Tensor: ...
@overload
def rms_norm_linear(
    input: Tensor,
    norm_weight: Tensor | None,
    weight: Tensors,
    bias: OptionalTensors | None = None,
    eps: float | None = None,
    *,
    zero_centered_weight: bool = False,
) -> tuple[Tensor, ...]: ...
@names_arguments
def rms_norm_linear(
    input: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor | Tensors,
    bias: Tensor | OptionalTensors | None = None,
    eps: float | None = None,
    *,
    zero_centered_weight: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """rms_norm over the last dimension, then one linear or several that share its output.

    Saves for backward: input and 4 bytes a row.

    Args:
        input: (*, features).
        norm_weight: (features,), of input's dtype or float32; None for 1.
        weight, bias: as for layer_norm_linear.
        eps, zero_centered_weight: as for rms_norm.

    Returns, Raises: as for layer_norm_linear.
    """
    weights, biases = _as_lists(weight, bias)
    if not torch.compiler.is_compiling() and in_jit_trace():
        normed = rms_norm(
            input,
            [int(input.shape[-1])],
            norm_weight,
            eps,
            zero_centered_weight=zero_centered_weight,
        )
        return _traced(normed, weight, weights, biases)
    outputs = ops.rms_norm_linear(
        input, norm_weight, weights, biases, eps, zero_centered_weight=zero_centered_weight
    )
    return outputs[0] if isinstance(weight, Tensor) else tuple(outputs)


@names_arguments
def activation_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "gelu",
    activation_scalar: float | None = None,
) -> Tensor:
    """An activation, then a linear. Saves for backward: input.

    Args:
        input: (*, features).
        weight: (out, features), of input's dtype.
        bias: (out,), or None.
        activation: as for memopt.functional.activation. Default "gelu".
        activation_scalar: likewise. Default None.

    Returns:
        (*, out).

    Raises:
        RuntimeError: an argument breaks a rule above; the message names it and what was got.
    """
    output: Tensor = ops.activation_linear(
        input, weight, bias, activation=activation, activation_scalar=activation_scalar
    )
    return output


@names_arguments
def gelu_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none"
) -> Tensor:
    """activation_linear with gelu; approximate as for gelu."""
    return activation_linear(input, weight, bias, gelu_name("gelu_linear", approximate))


@names_arguments
def gated_linear(
    gate: Tensor,
    up: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "silu",
    activation_scalar: float | None = None,
) -> Tensor:
    """gated, then a linear. Saves for backward: gate and up.

    Args:
        gate, up: (*, features).
        weight, bias, activation, activation_scalar: as for activation_linear; silu by default.

    Returns, Raises: as for activation_linear.
    """
    output: Tensor = ops.gated_linear(
        gate, up, weight, bias, activation=activation, activation_scalar=activation_scalar
    )
    return output


@names_arguments
def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """gated_linear with silu."""
    return gated_linear(gate, up, weight, bias, "silu")


@names_arguments
def gated_packed_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "silu",
    interleaved: bool = False,
    activation_scalar: float | None = None,
) -> Tensor:
    """gated_packed, then a linear. Saves for backward: input.

    Args:
        input: (*, 2 features), gate and up as gated_packed takes them.
        weight, bias, activation, activation_scalar: as for activation_linear; silu by default.
        interleaved: as for gated_packed.

    Returns, Raises: as for activation_linear.
    """
    output: Tensor = ops.gated_packed_linear(
        input,
        weight,
        bias,
        activation=activation,
        interleaved=interleaved,
        activation_scalar=activation_scalar,
    )
    return output


def _traced(
    normed: Tensor, weight: Tensor | Tensors, weights: Tensors, biases: OptionalTensors
) -> Tensor | tuple[Tensor, ...]:
    """The linears apart: torch.jit.trace takes no op with a list of optional tensors."""
    outputs = [linear(normed, *pair) for pair in zip(weights, biases, strict=True)]
    return outputs[0] if isinstance(weight, Tensor) else tuple(outputs)


def _as_lists(
    weight: Tensor | Tensors, bias: Tensor | OptionalTensors | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    if isinstance(weight, Tensor):
        if bias is not None and not isinstance(bias, Tensor):
            raise TypeError(
                f"bias must be a tensor or None with one weight, got {type(bias).__name__}"
            )
        return [weight], [bias]
    weights = list(weight)
    if isinstance(bias, Tensor):
        raise TypeError(
            "bias must be a sequence or None with several weights (a sequence), got a Tensor"
        )
    return weights, [None] * len(weights) if bias is None else list(bias)
