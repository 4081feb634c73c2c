"""Activations, element by element: one op that takes the activation's name."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from memopt._extension import _C, ops
from memopt.functional.arguments import names_arguments

__all__ = [
    "ACTIVATIONS",
    "activation",
    "activation_",
    "elu",
    "gelu",
    "hardsigmoid",
    "hardswish",
    "leaky_relu",
    "mish",
    "quick_gelu",
    "relu",
    "relu6",
    "relu_squared",
    "sigmoid",
    "silu",
    "softcap",
]

ACTIVATIONS: dict[str, bool] = _C.activations()
"""The activations that ops take by name; of each, whether it takes an activation_scalar. The list
is the kernels' own (csrc/kernels/activation.h).
"""

FORMULAS: dict[str, Callable[..., Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu_squared": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "softcap": lambda x, cap: cap * torch.tanh(x / cap),
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "mish": F.mish,
}
"""The formulas of a model without memopt, of x and of the scalar if there is one."""

SCALAR_NAMES = {"softcap": "cap", "leaky_relu": "negative_slope", "elu": "alpha"}
"""The names of the scalars, as the functions of this module have them."""


def formula(name: str, scalar: float | None = None) -> Callable[[Tensor], Tensor]:
    """The formula of an activation in a model without memopt."""
    written = FORMULAS[name]
    if scalar is None:
        return written
    return functools.partial(written, **{SCALAR_NAMES[name]: scalar})


# Looked up once. Each lookup, keyword and Python function between costs time on the host.
_op: Callable[..., Tensor] = ops.activation.default
_op_in_place: Callable[..., None] = ops.activation_.default


@names_arguments
def activation(input: Tensor, activation: str, activation_scalar: float | None = None) -> Tensor:
    """f(x) element by element, for an activation f by its name.

    Saves for backward: input. Backward computes f'(x) from it, in one kernel.

    Args:
        input: any shape.
        activation: f, a name in memopt.functional.ACTIVATIONS. The functions of this module say
            what each computes.
        activation_scalar: the number of an activation that takes one; None (default) for others.

    Returns:
        A tensor of input's shape, dtype and memory layout.

    Raises:
        RuntimeError: an unsupported dtype, device or layout, another `activation`, or a scalar
            where there should be none, or none where there should be one.
    """
    if activation_scalar is None:
        return _op(input, activation)
    return _op(input, activation, activation_scalar)


@names_arguments
def activation_(input: Tensor, activation: str, activation_scalar: float | None = None) -> Tensor:
    """`activation`, written over `input`, with the semantics of PyTorch's in-place ops: whoever
    holds `input` or a view of it finds the activated values there afterwards.

    Saves for backward: what is overwritten. That is nothing where it has a recipe (see
    `memopt.recipes`), as the output of a norm of memopt's has, and otherwise a clone, as PyTorch's
    silu_ and hardswish_ save one; relu, leaky_relu, elu and sigmoid are then PyTorch's own in-place
    ops, which save the result. The result has a recipe wherever what is overwritten is
    saved.

    Args:
        input: any shape; a leaf that requires a gradient is refused, as by PyTorch.
        activation: as for `activation`.
        activation_scalar: as for `activation`.

    Returns:
        `input`.
    """
    _op_in_place(input, activation, activation_scalar)
    return input


def gelu_name(op: str, approximate: str) -> str:
    """The name in ACTIVATIONS of gelu's form. Raises RuntimeError, as PyTorch does, for another
    `approximate` than "none" and "tanh".
    """
    if approximate not in ("none", "tanh"):
        raise RuntimeError(f"{op}: approximate must be 'none' or 'tanh', got {approximate!r}")
    return "gelu_tanh" if approximate == "tanh" else "gelu"


@names_arguments
def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """Gaussian error linear unit, x Phi(x), element by element.

    Saves for backward: input. Source: Hendrycks and Gimpel, arXiv:1606.08415.

    Args:
        input: any shape.
        approximate: "none" (default) for the exact form, "tanh" for
            0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).

    Returns:
        A tensor of input's shape, dtype and memory layout.

    Raises:
        RuntimeError: an unsupported dtype, device or layout, or another `approximate`.
    """
    return _op(input, gelu_name("gelu", approximate))


@names_arguments
def silu(input: Tensor) -> Tensor:
    """x s(x) element by element, s the logistic function (also called swish).

    Shape, errors and what is saved as for gelu. Source: Elfwing et al., arXiv:1702.03118.
    """
    return _op(input, "silu")


@names_arguments
def relu(input: Tensor) -> Tensor:
    """max(x, 0) element by element; the derivative at 0 is 0. NaN stays NaN.

    Shape, errors and what is saved as for gelu.
    """
    return _op(input, "relu")


@names_arguments
def quick_gelu(input: Tensor) -> Tensor:
    """x s(1.702 x) element by element, s the logistic function.

    Shape, errors and what is saved as for gelu. Source: Hendrycks and Gimpel, arXiv:1606.08415.
    """
    return _op(input, "quick_gelu")


@names_arguments
def relu_squared(input: Tensor) -> Tensor:
    """max(x, 0)^2 element by element.

    Shape, errors and what is saved as for gelu. Source: So et al., arXiv:2109.08668.
    """
    return _op(input, "relu_squared")


@names_arguments
def sigmoid(input: Tensor) -> Tensor:
    """The logistic function 1 / (1 + exp(-x)) element by element.

    Shape, errors and what is saved as for gelu.
    """
    return _op(input, "sigmoid")


@names_arguments
def softcap(input: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap) element by element: x near 0, and never beyond cap.

    Shape, errors and what is saved as for gelu. Source: Gemma 2 (arXiv:2408.00118), which caps
    attention logits at 50 and output logits at 30.

    Args:
        input: any shape.
        cap: finite and positive.
    """
    return _op(input, "softcap", cap)


@names_arguments
def relu6(input: Tensor) -> Tensor:
    """min(max(x, 0), 6) element by element; the derivative at 0 and at 6 is 0.

    Shape, errors and what is saved as for gelu. Source: MobileNetV2 (arXiv:1801.04381).
    """
    return _op(input, "relu6")


@names_arguments
def leaky_relu(input: Tensor, negative_slope: float = 0.01) -> Tensor:
    """x for x > 0, and negative_slope x elsewhere.

    Shape, errors and what is saved as for gelu. Source: Maas et al., ICML 2013.

    Args:
        input: any shape.
        negative_slope: finite and positive.
    """
    return _op(input, "leaky_relu", negative_slope)


@names_arguments
def elu(input: Tensor, alpha: float = 1.0) -> Tensor:
    """x for x > 0, and alpha (exp(x) - 1) elsewhere.

    Shape, errors and what is saved as for gelu. Source: Clevert et al., arXiv:1511.07289.

    Args:
        input: any shape.
        alpha: finite and positive.
    """
    return _op(input, "elu", alpha)


@names_arguments
def hardsigmoid(input: Tensor) -> Tensor:
    """min(max(x + 3, 0), 6) / 6 element by element.

    Shape, errors and what is saved as for gelu. Source: MobileNetV3 (arXiv:1905.02244).
    """
    return _op(input, "hardsigmoid")


@names_arguments
def hardswish(input: Tensor) -> Tensor:
    """x min(max(x + 3, 0), 6) / 6 element by element.

    Shape, errors and what is saved as for gelu. Source: MobileNetV3 (arXiv:1905.02244).
    """
    return _op(input, "hardswish")


@names_arguments
def mish(input: Tensor) -> Tensor:
    """x tanh(log(1 + exp(x))) element by element.

    Shape, errors and what is saved as for gelu. Source: Misra, arXiv:1908.08681.
    """
    return _op(input, "mish")
