"""Gated units: an activation of one tensor times another."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from memopt._extension import ops
from memopt.functional.activation import gelu_name
from memopt.functional.arguments import names_arguments

# Looked up once. Each lookup, keyword and Python function between costs time on the host.
_gated: Callable[..., Tensor] = ops.gated.default
_gated_packed: Callable[..., Tensor] = ops.gated_packed.default


@names_arguments
def gated(
    gate: Tensor, up: Tensor, activation: str, activation_scalar: float | None = None
) -> Tensor:
    """f(gate) up element by element, in one kernel each way.

    Saves for backward: gate and up, those that the wanted gradients need; PyTorch's two ops save
    f(gate) as well. Rows may have gaps between them, as the halves of one tensor have: nothing is
    copied. Source: Shazeer, arXiv:2002.05202.

    Args:
        gate: any shape.
        up: gate's shape, dtype and device.
        activation, activation_scalar: f, as for memopt.functional.activation.

    Returns:
        A tensor of gate's shape and dtype, in its memory order: dense strides are kept.

    Raises:
        RuntimeError: gate and up differ, an unsupported dtype, device or layout, or another
            `activation`.
    """
    if activation_scalar is None:
        return _gated(gate, up, activation)
    return _gated(gate, up, activation, activation_scalar)


@names_arguments
def gated_packed(
    input: Tensor,
    activation: str,
    interleaved: bool = False,
    activation_scalar: float | None = None,
) -> Tensor:
    """gated, of one tensor that holds gate and up: as one linear layer for both gives them.

    Saves for backward: input. Backward writes its gradient in the same arrangement.

    Args:
        input: (*, 2 n).
        activation, activation_scalar: as for gated.
        interleaved: False (default): the last dimension is gate's n elements, then up's. True: gate
            and up alternate, gate first.

    Returns:
        A tensor of shape (*, n) and input's dtype, its dimensions in input's memory order.

    Raises:
        RuntimeError: the last dimension is odd or there is none; or as for gated.
    """
    return _gated_packed(
        input,
        activation,
        interleaved=interleaved,
        activation_scalar=activation_scalar,
    )


@names_arguments
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) up: gated with "silu"."""
    return _gated(gate, up, "silu")


@names_arguments
def swiglu_packed(input: Tensor, interleaved: bool = False) -> Tensor:
    """gated_packed with "silu"."""
    return gated_packed(input, "silu", interleaved)


@names_arguments
def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """gelu(gate, approximate) up: gated with "gelu", or "gelu_tanh" where approximate is "tanh"."""
    return gated(gate, up, gelu_name("geglu", approximate))


@names_arguments
def geglu_packed(input: Tensor, interleaved: bool = False, approximate: str = "none") -> Tensor:
    """gated_packed with "gelu", or "gelu_tanh" where approximate is "tanh"."""
    return gated_packed(input, gelu_name("geglu_packed", approximate), interleaved)
