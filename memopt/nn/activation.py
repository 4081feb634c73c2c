"""Activations as modules: torch.nn's, two more with a class of their own, and any by its name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from memopt import functional
from memopt.functional.arguments import names_arguments


class GELU(torch.nn.GELU):
    """torch.nn.GELU on memopt.functional.gelu: saves its input for backward and nothing else.

    Args:
        approximate: "none" (default) or "tanh".

    Shape: any to the same.
    """

    def forward(self, input: Tensor) -> Tensor:
        return functional.gelu(input, self.approximate)


def _of(module: torch.nn.Module, input: Tensor, name: str, scalar: float | None = None) -> Tensor:
    """The activation of the input, over it where the module is in place."""
    run = functional.activation_ if module.inplace else functional.activation
    return run(input, name, scalar)


class SiLU(torch.nn.SiLU):
    """torch.nn.SiLU on memopt's silu: saves its input for backward and nothing else.

    Args:
        inplace: write over the input; what is then saved, `memopt.functional.activation_` says.

    Shape: any to the same.
    """

    def forward(self, input: Tensor) -> Tensor:
        return _of(self, input, "silu")


class ReLU(torch.nn.ReLU):
    """torch.nn.ReLU on memopt's relu: saves its input for backward.

    PyTorch's saves its output, which a following Linear saves as well: choose PyTorch's there, and
    this one where the input is saved anyway.

    Args:
        inplace: as for SiLU.

    Shape: any to the same.
    """

    def forward(self, input: Tensor) -> Tensor:
        return _of(self, input, "relu")


class ReLU6(torch.nn.ReLU6):
    """torch.nn.ReLU6 on memopt's relu6: saves its input for backward and nothing else.

    Args:
        inplace: as for SiLU.

    Shape: any to the same.
    """

    def forward(self, input: Tensor) -> Tensor:
        return _of(self, input, "relu6")


class LeakyReLU(torch.nn.LeakyReLU):
    """torch.nn.LeakyReLU on memopt's leaky_relu: saves its input for backward and nothing else.

    Args:
        negative_slope: finite and positive.
        inplace: as for SiLU.

    Shape: any to the same.
    """

    def forward(self, input: Tensor) -> Tensor:
        return _of(self, input, "leaky_relu", self.negative_slope)


class ELU(torch.nn.ELU):
    """torch.nn.ELU on memopt's elu: saves its input for backward and nothing else.

    Args:
        alpha: finite and positive.
        inplace: as for SiLU.

    Shape: any to the same.
    """

    def forward(self, input: Tensor) -> Tensor:
        return _of(self, input, "elu", self.alpha)


class Hardsigmoid(torch.nn.Hardsigmoid):
    """torch.nn.Hardsigmoid on memopt's hardsigmoid: saves its input for backward and nothing else.

    Args:
        inplace: as for SiLU.

    Shape: any to the same.
    """

    def forward(self, input: Tensor) -> Tensor:
        return _of(self, input, "hardsigmoid")


class Hardswish(torch.nn.Hardswish):
    """torch.nn.Hardswish on memopt's hardswish: saves its input for backward and nothing else.

    Args:
        inplace: as for SiLU.

    Shape: any to the same.
    """

    def forward(self, input: Tensor) -> Tensor:
        return _of(self, input, "hardswish")


class Mish(torch.nn.Mish):
    """torch.nn.Mish on memopt's mish: saves its input for backward and nothing else.

    Args:
        inplace: as for SiLU.

    Shape: any to the same.
    """

    def forward(self, input: Tensor) -> Tensor:
        return _of(self, input, "mish")


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


class Activation(torch.nn.Module):
    """Any activation by its name, by memopt.functional.activation: saves its input for backward.

    Args:
        activation: a name in memopt.functional.ACTIVATIONS; ValueError for another.
        activation_scalar: the number of an activation that takes one. Default None.

    Shape: any to the same.
    """

    @names_arguments
    def __init__(self, activation: str, activation_scalar: float | None = None) -> None:
        super().__init__()
        check_activation(type(self).__name__, activation, activation_scalar)
        self.activation = activation
        self.activation_scalar = activation_scalar

    def forward(self, input: Tensor) -> Tensor:
        return functional.activation(input, self.activation, self.activation_scalar)

    def extra_repr(self) -> str:
        return described(self.activation, self.activation_scalar)


# What torch.nn, and else this file, has a class of its own for.
MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "gelu": torch.nn.GELU,
    "gelu_tanh": lambda: torch.nn.GELU("tanh"),
    "silu": torch.nn.SiLU,
    "relu": torch.nn.ReLU,
    "quick_gelu": QuickGELU,
    "relu_squared": ReLUSquared,
    "sigmoid": torch.nn.Sigmoid,
    "relu6": torch.nn.ReLU6,
    "hardsigmoid": torch.nn.Hardsigmoid,
    "hardswish": torch.nn.Hardswish,
    "mish": torch.nn.Mish,
}


def check_activation(owner: str, activation: str, activation_scalar: float | None) -> None:
    """Raises ValueError if no activation has this name, or if the scalar is not what it takes."""
    if activation not in functional.ACTIVATIONS:
        names = ", ".join(map(repr, functional.ACTIVATIONS))
        raise ValueError(f"{owner}: activation must be one of {names}, got {activation!r}")
    takes_scalar = functional.ACTIVATIONS[activation]
    if takes_scalar != (activation_scalar is not None):
        rule = "a number" if takes_scalar else "None"
        raise ValueError(
            f"{owner}: activation_scalar must be {rule} for {activation!r}, got {activation_scalar}"
        )


def described(activation: str, activation_scalar: float | None) -> str:
    """The activation's part of a module's extra_repr."""
    scalar = "" if activation_scalar is None else f", activation_scalar={activation_scalar}"
    return f"activation={activation!r}{scalar}"


def module_of(activation: str, activation_scalar: float | None = None) -> torch.nn.Module:
    """A new module of the activation of this name."""
    if activation in MODULES:
        return MODULES[activation]()
    return Activation(activation, activation_scalar)


def kind_and_name(owner: str, module: object) -> tuple[type[torch.nn.Module], str, float | None]:
    """The class in this file or torch.nn's that the module is of, the activation's name and its
    scalar. Raises TypeError if it is none.
    """
    if isinstance(module, Activation):
        return Activation, module.activation, module.activation_scalar
    for name in MODULES:
        like = module_of(name)
        same_form = getattr(module, "approximate", None) == getattr(like, "approximate", None)
        if isinstance(module, type(like)) and same_form:
            return type(like), name, None
    raise TypeError(
        f"{owner}.from_modules: takes an activation of torch.nn or memopt.nn and a Linear, got "
        f"{type(module).__name__}"
    )
