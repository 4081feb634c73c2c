"""Activations, element by element."""

from __future__ import annotations

import torch
from torch import Tensor

import memopt._extension  # noqa: F401  (registers the operators)


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
    output: Tensor = torch.ops.memopt.gelu(input, approximate=approximate)
    return output


def silu(input: Tensor) -> Tensor:
    """x s(x) element by element, s the logistic function (also called swish).

    Shape, errors and what is saved as for gelu. Source: Elfwing et al., arXiv:1702.03118.
    """
    output: Tensor = torch.ops.memopt.silu(input)
    return output


def relu(input: Tensor) -> Tensor:
    """max(x, 0) element by element; the derivative at 0 is 0. NaN stays NaN.

    Shape, errors and what is saved as for gelu.
    """
    output: Tensor = torch.ops.memopt.relu(input)
    return output


def quick_gelu(input: Tensor) -> Tensor:
    """x s(1.702 x) element by element, s the logistic function.

    Shape, errors and what is saved as for gelu. Source: Hendrycks and Gimpel, arXiv:1606.08415.
    """
    output: Tensor = torch.ops.memopt.quick_gelu(input)
    return output


def relu_squared(input: Tensor) -> Tensor:
    """max(x, 0)^2 element by element.

    Shape, errors and what is saved as for gelu. Source: So et al., arXiv:2109.08668.
    """
    output: Tensor = torch.ops.memopt.relu_squared(input)
    return output


def sigmoid(input: Tensor) -> Tensor:
    """The logistic function 1 / (1 + exp(-x)) element by element.

    Shape, errors and what is saved as for gelu.
    """
    output: Tensor = torch.ops.memopt.sigmoid(input)
    return output
