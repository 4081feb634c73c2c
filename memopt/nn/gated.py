"""Gated units as modules, without parameters: of gate and up, or of one tensor that holds both."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt import functional
from memopt.functional.activation import gelu_name
from memopt.functional.arguments import names_arguments
from memopt.nn.activation import check_activation, described


class Gated(torch.nn.Module):
    """activation(gate) up by memopt.functional.gated, or gated_packed if called with one tensor.

    Saves for backward: gate and up, or the packed tensor.

    Args:
        activation: as for memopt.functional.gated; ValueError for another.
        interleaved: how the packed tensor holds the two: False (default) gate, then up; True
            alternating.
        activation_scalar: as for memopt.functional.gated. Default None.

    Shape: (*, n) and (*, n), or (*, 2 n), to (*, n).
    """

    @names_arguments
    def __init__(
        self, activation: str, interleaved: bool = False, activation_scalar: float | None = None
    ) -> None:
        super().__init__()
        check_activation(type(self).__name__, activation, activation_scalar)
        self.activation = activation
        self.activation_scalar = activation_scalar
        self.interleaved = interleaved

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        name, scalar = self.activation, self.activation_scalar
        if up is None:
            return functional.gated_packed(gate, name, self.interleaved, scalar)
        return functional.gated(gate, up, name, scalar)

    def extra_repr(self) -> str:
        interleaved = ", interleaved=True" if self.interleaved else ""
        return described(self.activation, self.activation_scalar) + interleaved


class SwiGLU(Gated):
    """silu(gate) up by memopt.functional.swiglu, or swiglu_packed if called with one tensor.

    Saves for backward: gate and up, or the packed tensor; not silu(gate).

    Args:
        interleaved: how the packed tensor holds the two: False (default) gate, then up; True
            alternating.

    Shape: (*, n) and (*, n), or (*, 2 n), to (*, n).
    """

    @names_arguments
    def __init__(self, interleaved: bool = False) -> None:
        super().__init__("silu", interleaved)

    def extra_repr(self) -> str:
        return "interleaved=True" if self.interleaved else ""


class GEGLU(Gated):
    """gelu(gate) up by memopt.functional.geglu, or geglu_packed if called with one tensor.

    Saves for backward: gate and up, or the packed tensor; not gelu(gate).

    Args:
        approximate: "none" (default) or "tanh"; RuntimeError for another.
        interleaved: as for SwiGLU.

    Shape: (*, n) and (*, n), or (*, 2 n), to (*, n).
    """

    @names_arguments
    def __init__(self, approximate: str = "none", interleaved: bool = False) -> None:
        super().__init__(gelu_name("geglu", approximate), interleaved)

    @property
    def approximate(self) -> str:
        return "tanh" if self.activation == "gelu_tanh" else "none"

    def extra_repr(self) -> str:
        interleaved = ", interleaved=True" if self.interleaved else ""
        return f"approximate={self.approximate!r}{interleaved}"


def unit_of(
    activation: str, interleaved: bool = False, activation_scalar: float | None = None
) -> Gated:
    """A new module of the unit with the activation of this name."""
    if activation == "silu":
        return SwiGLU(interleaved)
    if activation in ("gelu", "gelu_tanh"):
        return GEGLU("tanh" if activation == "gelu_tanh" else "none", interleaved)
    return Gated(activation, interleaved, activation_scalar)
