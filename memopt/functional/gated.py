"""Gated units: an activation of one tensor times another."""

from __future__ import annotations

import torch
from torch import Tensor

import memopt._extension  # noqa: F401  (registers the operators)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """f(gate) up element by element, in one kernel each way.

    Saves for backward: gate and up, those that the wanted gradients need; PyTorch's two ops save
    f(gate) as well. Rows may have gaps between them, as the halves of one tensor have: nothing is
    copied. Source: Shazeer, arXiv:2002.05202.

    Args:
        gate: any shape.
        up: gate's shape, dtype and device.
        activation: f, one of "gelu", "gelu_tanh", "silu", "relu", "quick_gelu", "relu_squared" and
            "sigmoid".

    Returns:
        A contiguous tensor of gate's shape and dtype.

    Raises:
        RuntimeError: gate and up differ, an unsupported dtype, device or layout, or another
            `activation`.
    """
    output: Tensor = torch.ops.memopt.gated(gate, up, activation=activation)
    return output


def gated_packed(input: Tensor, activation: str, interleaved: bool = False) -> Tensor:
    """gated, of one tensor that holds gate and up: as one linear layer for both gives them.

    Saves for backward: input. Backward writes its gradient in the same arrangement.

    Args:
        input: (*, 2 n).
        activation: as for gated.
        interleaved: False (default): the last dimension is gate's n elements, then up's. True: gate
            and up alternate, gate first.

    Returns:
        A contiguous tensor of shape (*, n) and input's dtype.

    Raises:
        RuntimeError: an odd last dimension or none, or what gated refuses.
    """
    output: Tensor = torch.ops.memopt.gated_packed(
        input, activation=activation, interleaved=interleaved
    )
    return output


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) up: gated with "silu"."""
    output: Tensor = torch.ops.memopt.swiglu(gate, up)
    return output


def swiglu_packed(input: Tensor, interleaved: bool = False) -> Tensor:
    """gated_packed with "silu"."""
    output: Tensor = torch.ops.memopt.swiglu_packed(input, interleaved=interleaved)
    return output


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """gelu(gate, approximate) up: gated with "gelu", or "gelu_tanh" where approximate is "tanh"."""
    output: Tensor = torch.ops.memopt.geglu(gate, up, approximate=approximate)
    return output


def geglu_packed(input: Tensor, interleaved: bool = False, approximate: str = "none") -> Tensor:
    """gated_packed with "gelu", or "gelu_tanh" where approximate is "tanh"."""
    output: Tensor = torch.ops.memopt.geglu_packed(
        input, interleaved=interleaved, approximate=approximate
    )
    return output
