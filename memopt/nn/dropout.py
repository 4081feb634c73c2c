"""Dropout as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt import functional
from memopt.functional.arguments import names_arguments


class Dropout(torch.nn.Dropout):
    """torch.nn.Dropout on memopt.functional.dropout: saves 16 bytes a call for backward, no mask.

    eval() makes it the identity: it returns its input itself.

    Args:
        p: the probability of zeroing an element. Default 0.5.
        inplace: must be False, for the signature's sake.

    Shape: any to the same.
    """

    @names_arguments
    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        if inplace:
            raise ValueError(f"Dropout: inplace must be False, got {inplace}")
        super().__init__(p, inplace)

    def forward(self, input: Tensor) -> Tensor:
        return functional.dropout(input, self.p, self.training)
