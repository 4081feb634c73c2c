"""GELU as a module."""

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
