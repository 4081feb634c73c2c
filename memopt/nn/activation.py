"""Activations as modules: torch.nn's, and two that it has not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from memopt import functional


class GELU(torch.nn.GELU):
    """torch.nn.GELU on memopt.functional.gelu: saves its input for backward and nothing else.

    Args:
        approximate: "none" (default) or "tanh".

    Shape: any to the same.
    """

    def forward(self, input: Tensor) -> Tensor:
        return functional.gelu(input, self.approximate)


def _refuse_inplace(module: torch.nn.Module, inplace: bool) -> None:
    if inplace:
        name = type(module).__name__
        raise ValueError(f"memopt.nn.{name}: inplace must be False: backward needs the input")


class SiLU(torch.nn.SiLU):
    """torch.nn.SiLU on memopt.functional.silu: saves its input for backward and nothing else.

    Args:
        inplace: False; True is refused (ValueError), since backward needs the input.

    Shape: any to the same.
    """

    def __init__(self, inplace: bool = False) -> None:
        _refuse_inplace(self, inplace)
        super().__init__()

    def forward(self, input: Tensor) -> Tensor:
        return functional.silu(input)


class ReLU(torch.nn.ReLU):
    """torch.nn.ReLU on memopt.functional.relu: saves its input for backward.

    PyTorch's saves its output, which a following Linear saves as well: choose PyTorch's there, and
    this one where the input is saved anyway.

    Args:
        inplace: False; True is refused (ValueError), since backward needs the input.

    Shape: any to the same.
    """

    def __init__(self, inplace: bool = False) -> None:
        _refuse_inplace(self, inplace)
        super().__init__()

    def forward(self, input: Tensor) -> Tensor:
        return functional.relu(input)


class Sigmoid(torch.nn.Sigmoid):
    """torch.nn.Sigmoid on memopt.functional.sigmoid: saves its input for backward.

    Shape: any to the same.
    """

    def forward(self, input: Tensor) -> Tensor:
        return functional.sigmoid(input)


class QuickGELU(torch.nn.Module):
    """x sigmoid(1.702 x) by memopt.functional.quick_gelu: saves its input for backward.

    Shape: any to the same.
    """

    def forward(self, input: Tensor) -> Tensor:
        return functional.quick_gelu(input)


class ReLUSquared(torch.nn.Module):
    """max(x, 0)^2 by memopt.functional.relu_squared: saves its input for backward.

    Shape: any to the same.
    """

    def forward(self, input: Tensor) -> Tensor:
        return functional.relu_squared(input)


# A module of each activation that an op takes by name: torch.nn's, where it has this one.
MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "gelu": torch.nn.GELU,
    "gelu_tanh": lambda: torch.nn.GELU("tanh"),
    "silu": torch.nn.SiLU,
    "relu": torch.nn.ReLU,
    "quick_gelu": QuickGELU,
    "relu_squared": ReLUSquared,
    "sigmoid": torch.nn.Sigmoid,
}


def checked_activation(owner: str, activation: str) -> str:
    """The name itself. Raises ValueError if no activation has it."""
    if activation not in MODULES:
        names = ", ".join(map(repr, MODULES))
        raise ValueError(f"{owner}: activation must be one of {names}, got {activation!r}")
    return activation


def module_of(activation: str) -> torch.nn.Module:
    """A new module of the activation of this name."""
    return MODULES[activation]()


def kind_and_name(owner: str, module: object) -> tuple[type[torch.nn.Module], str]:
    """The class in MODULES that the module is of, and the name. Raises TypeError if it is none."""
    for name in MODULES:
        like = module_of(name)
        same_form = getattr(module, "approximate", None) == getattr(like, "approximate", None)
        if isinstance(module, type(like)) and same_form:
            return type(like), name
    raise TypeError(
        f"{owner}.from_modules: takes an activation of torch.nn or memopt.nn and a Linear, got "
        f"{type(module).__name__}"
    )
