"""Activations as modules: torch.nn's, and two that it has not."""

from __future__ import annotations

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
