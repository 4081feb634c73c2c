"""The activations: gelu in both forms, and all others that have a name.

All are one op, which takes the activation's name. A new one is a line in each table of this file.
What the op does, whatever it computes, is tested with some of them. The values and derivatives of
all are tested, alone, in their gated units and with dropout behind, and their kernels under the
interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from memopt.functional.activation import FORMULAS, SCALAR_NAMES, formula

from .call import Call, Results
from .op import OpCase, Saved

# Bounds of GELU's first and second derivative, erf and tanh form alike (maxima 1.129 and 0.798).
GELU_SLOPE = 1.13
GELU_CURVATURE = 0.8

# Of the activations that take one, the scalar that they are tested with.
SCALARS: dict[str, float] = {"softcap": 2.0, "leaky_relu": 0.25, "elu": 1.5}

# Bounds of the first derivatives, for each activation whose derivative is bounded.
SLOPES = {
    "gelu": GELU_SLOPE,
    "gelu_tanh": GELU_SLOPE,
    "silu": 1.1,
    "relu": 1.0,
    "quick_gelu": 1.1,
    "sigmoid": 0.25,
    "softcap": 1.0,
    "relu6": 1.0,
    "leaky_relu": 1.0,
    "elu": 1.5,
    "hardsigmoid": 1 / 6,
    "hardswish": 1.5,
    "mish": 1.1,
}


def named(activation: str) -> dict[str, Any]:
    """An op's keyword arguments for the activation, with its scalar if it takes one."""
    scalar = {"activation_scalar": SCALARS[activation]} if activation in SCALARS else {}
    return {"activation": activation, **scalar}


def exact_gelu(x: Tensor, approximate: str) -> Tensor:
    """max(x, 0) + n cdf(n) with n = -|x|: nothing cancels in either tail, neither in the value nor
    in the derivative.
    """
    n = torch.where(x < 0, x, -x)
    if approximate == "none":
        cdf = 0.5 * torch.erfc(n * -math.sqrt(0.5))
    else:
        cdf = torch.sigmoid(2 * math.sqrt(2 / math.pi) * (n + 0.044715 * n**3))
    return torch.where(x < 0, 0.0, x) + n * cdf


# By PyTorch's own ops.
TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    name: formula(name, SCALARS.get(name)) for name in FORMULAS
}

# Those that go through the tests of values alone.
VALUES_ONLY = ("relu6", "leaky_relu", "elu", "hardsigmoid", "hardswish", "mish")
THROUGHOUT = tuple(name for name in TORCH if name not in VALUES_ONLY)


def torch_activation(name: str, x: Tensor) -> Tensor:
    return TORCH[name](x)


def logistic(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) without the overflow of exp(-x) in the left tail."""
    e = torch.exp(torch.where(x < 0, x, -x))
    return torch.where(x < 0, e, 1.0) / (1 + e)


def exact_mish(x: Tensor) -> Tensor:
    """x n / (n + 2) for n = e^2 + 2 e, e = exp(x), which does not overflow for x < 300."""
    e = torch.exp(x.clamp(max=100))
    n = e * (e + 2)
    return x * (n / (n + 2))


# In float64, exact to float32 in both tails, where PyTorch's formula is not.
EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: exact_gelu(x, "none"),
    "gelu_tanh": lambda x: exact_gelu(x, "tanh"),
    "silu": lambda x: x * logistic(x),
    "quick_gelu": lambda x: x * logistic(1.702 * x),
    "sigmoid": logistic,
    "elu": lambda x: torch.where(x > 0, x, SCALARS["elu"] * torch.expm1(x.clamp(max=0))),
    "mish": exact_mish,
    # PyTorch's own derivative has 1/6 in float32 in any dtype, and its value multiplies by x before
    # it divides, which overflows.
    "hardsigmoid": lambda x: (x + 3).clamp(0, 6) / 6,
    "hardswish": lambda x: x * ((x + 3).clamp(0, 6) / 6),
}


def exact_activation(name: str, x: Tensor) -> Tensor:
    return EXACT.get(name, TORCH[name])(x)


def value_magnitude(name: str, x: Tensor) -> Tensor:
    """The size of what is rounded on the way to f(x).

    For GELU x, whose distribution function is right to an absolute rounding. The others keep their
    relative accuracy but for what the exponential magnifies, the rounding of its argument: of
    1.702 x, or of x log2(e) on processors without a fused multiply-add.
    """
    if name in ("silu", "sigmoid", "quick_gelu", "mish"):
        scale = 1.702 if name == "quick_gelu" else 1.0
        return exact_activation(name, x).abs() * (1 + scale * x.abs())
    return x.abs() if name in ("gelu", "gelu_tanh") else exact_activation(name, x).abs()


def slope_magnitude(name: str, x: Tensor) -> Tensor | float:
    """The same for f'(x), which differs from its bound by sums that cancel."""
    return 2 * x.abs() if name == "relu_squared" else SLOPES[name]


@dataclass(frozen=True)
class ActivationCase(OpCase):
    approximate: str | None = None
    """Which form of gelu; None for the others."""

    private: ClassVar[str] = "activation"
    elementwise: ClassVar[bool] = True

    def __str__(self) -> str:
        return "-".join(filter(None, (self.family, self.approximate)))

    @property
    def activation(self) -> str:
        """The name that ops take."""
        return "gelu_tanh" if self.approximate == "tanh" else self.family

    @property
    def keywords(self) -> dict[str, Any]:
        """Of the public function."""
        if self.family in SCALARS:
            return {SCALAR_NAMES[self.family]: SCALARS[self.family]}
        return {} if self.approximate is None else {"approximate": self.approximate}

    def call_options(self, device: torch.device) -> dict[str, Any]:
        return self.keywords

    @property
    def public_op(self) -> torch._ops.OpOverload:
        return torch.ops.memopt.activation.default

    def public_arguments(self, call: Call) -> tuple[tuple, dict[str, Any]]:
        return (call.input,), named(self.activation)

    def backward_arguments(
        self,
        call: Call,
        saved: Saved,
        output_mask: tuple[bool, ...] | None = None,
        recompute_output: bool = False,
    ) -> tuple[tuple, dict[str, Any]]:
        keywords = {**named(self.activation), "recompute_output": recompute_output}
        return (call.grad_output, call.input), keywords

    def torch(self, call: Call) -> Tensor:
        return torch_activation(self.activation, call.input)

    def exact(self, call: Call) -> Tensor:
        return exact_activation(self.activation, call.input)

    def magnitudes(self, call: Call) -> Results:
        slope = slope_magnitude(self.activation, call.input)
        return Results(
            output=value_magnitude(self.activation, call.input),
            grad_input=slope * call.grad_output.abs(),
        )


GELU_CASES = (ActivationCase("gelu", "none"), ActivationCase("gelu", "tanh"))
ACTIVATION_CASES = (
    *GELU_CASES,
    *(ActivationCase(name) for name in THROUGHOUT if not name.startswith("gelu")),
)
FURTHER_ACTIVATION_CASES = tuple(ActivationCase(name) for name in VALUES_ONLY)
