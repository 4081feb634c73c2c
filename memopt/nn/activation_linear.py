"""An activation or a gated unit with the linear behind it, as one module: the tensor between is not
kept.

The module holds a torch.nn.Linear, whose parameters it reads: its forward does not run, nor do
hooks on it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memopt import functional
from memopt.functional.arguments import names_arguments
from memopt.nn.activation import check_activation, described, kind_and_name, module_of
from memopt.nn.gated import Gated, unit_of
from memopt.nn.linear import around, check_kinds


class ActivationLinear(nn.Module):
    """Linear(activation(x)) by memopt.functional.activation_linear. Saves its input.

    state_dict keys: linear.weight, linear.bias.

    Args:
        in_features, out_features, bias: of the linear.
        activation, activation_scalar: as for memopt.nn.Activation. Default "gelu".
        device, dtype: of the parameters.

    Shape: (*, in_features) to (*, out_features).
    """

    @names_arguments
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str = "gelu",
        device: Any = None,
        dtype: torch.dtype | None = None,
        activation_scalar: float | None = None,
    ) -> None:
        super().__init__()
        check_activation(type(self).__name__, activation, activation_scalar)
        self.activation = activation
        self.activation_scalar = activation_scalar
        self.linear = nn.Linear(in_features, out_features, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        linear = self.linear
        return functional.activation_linear(
            input, linear.weight, linear.bias, self.activation, self.activation_scalar
        )

    def extra_repr(self) -> str:
        return described(self.activation, self.activation_scalar)

    @classmethod
    def from_modules(cls, activation: nn.Module, linear: nn.Linear) -> ActivationLinear:
        """A module on the very parameters of the linear. The activation is torch.nn's or
        memopt.nn's.
        """
        kind, name, scalar = kind_and_name(cls.__name__, activation)
        check_kinds(cls.__name__, activation, kind, linear)
        return around(
            cls, linear.training, activation=name, activation_scalar=scalar, linear=linear
        )

    def to_modules(self) -> tuple[nn.Module, nn.Linear]:
        """An activation (torch.nn's if it has this one), and the Linear that it is made of."""
        return module_of(self.activation, self.activation_scalar), self.linear


class GELULinear(ActivationLinear):
    """Linear(GELU(x)) by memopt.functional.activation_linear. Saves its input.

    state_dict keys: linear.weight, linear.bias.

    Args:
        in_features, out_features, bias: of the linear.
        approximate: of the GELU, "none" (default) or "tanh"; ValueError for another.
        device, dtype: of the parameters.

    Shape: (*, in_features) to (*, out_features).
    """

    @names_arguments
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        approximate: str = "none",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if approximate not in ("none", "tanh"):
            raise ValueError(
                f"GELULinear: approximate must be 'none' or 'tanh', got {approximate!r}"
            )
        activation = "gelu_tanh" if approximate == "tanh" else "gelu"
        super().__init__(in_features, out_features, bias, activation, device, dtype)

    @property
    def approximate(self) -> str:
        return "tanh" if self.activation == "gelu_tanh" else "none"

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"

    @classmethod
    def from_modules(cls, activation: nn.Module, linear: nn.Linear) -> GELULinear:
        """A module on the very parameters of the linear, for a GELU in front of it."""
        check_kinds(cls.__name__, activation, nn.GELU, linear)
        _, name, _ = kind_and_name(cls.__name__, activation)
        return around(cls, linear.training, activation=name, activation_scalar=None, linear=linear)


class GatedLinear(nn.Module):
    """Linear(activation(gate) up) by memopt.functional.gated_linear: saves gate and up. Or of one
    tensor that holds both, by gated_packed_linear: saves that.

    state_dict keys: linear.weight, linear.bias.

    Args:
        in_features, out_features, bias: of the linear.
        activation, activation_scalar: of gate, as for ActivationLinear. Default "silu": SwiGLU.
        packed: whether forward takes one tensor, gate and up in its last dimension, or, by default,
            two.
        interleaved: how a packed tensor holds them: False (default) gate, then up; True
            alternating. ValueError if not packed.
        device, dtype: of the parameters.

    Shape: (*, in_features) and (*, in_features), or packed (*, 2 in_features), to
        (*, out_features).
    """

    @names_arguments
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str = "silu",
        packed: bool = False,
        interleaved: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        activation_scalar: float | None = None,
    ) -> None:
        super().__init__()
        check_activation(type(self).__name__, activation, activation_scalar)
        self.activation = activation
        self.activation_scalar = activation_scalar
        if interleaved and not packed:
            raise ValueError("GatedLinear: interleaved must be False where packed is, got True")
        self.packed, self.interleaved = packed, interleaved
        self.linear = nn.Linear(in_features, out_features, bias, device, dtype)

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        linear = self.linear
        if (up is None) != self.packed:
            takes = "one packed tensor" if self.packed else "gate and up (packed=False)"
            got = "one tensor" if up is None else "two"
            raise TypeError(f"GatedLinear: takes {takes}, got {got}")
        name, scalar = self.activation, self.activation_scalar
        if up is None:
            return functional.gated_packed_linear(
                gate, linear.weight, linear.bias, name, self.interleaved, scalar
            )
        return functional.gated_linear(gate, up, linear.weight, linear.bias, name, scalar)

    def extra_repr(self) -> str:
        packed = f", packed=True, interleaved={self.interleaved}" if self.packed else ""
        return described(self.activation, self.activation_scalar) + packed

    @classmethod
    def from_modules(cls, unit: Gated, linear: nn.Linear, packed: bool = False) -> GatedLinear:
        """A module on the very parameters of the linear, behind a Gated, SwiGLU or GEGLU."""
        check_kinds(cls.__name__, unit, Gated, linear)
        return around(
            cls,
            linear.training,
            activation=unit.activation,
            activation_scalar=unit.activation_scalar,
            packed=packed,
            interleaved=packed and unit.interleaved,
            linear=linear,
        )

    def to_modules(self) -> tuple[Gated, nn.Linear]:
        """A SwiGLU, GEGLU or Gated, and the Linear that it is made of."""
        unit = unit_of(self.activation, self.interleaved, self.activation_scalar)
        return unit, self.linear
