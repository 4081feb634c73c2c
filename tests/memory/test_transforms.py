"""Proves: a transform of torch.func inside a model, around which PyTorch allows no saved-tensor
hooks, is refused in words by whatever counts bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memopt


@pytest.mark.parametrize(
    "count",
    [
        lambda model, x: memopt.saved_bytes(model, x),
        lambda model, x: memopt.convert(model, x),
        lambda model, x: memopt.anatomy(model, x, loss=torch.sum, measure=True),
        lambda model, x: memopt.anatomy(model, x, loss=torch.sum),
    ],
)
def test_a_transform_inside_is_refused_in_words(
    count: Callable[[nn.Module, Tensor], object],
) -> None:
    """PyTorch allows no hooks around it."""

    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            slope: Tensor = torch.func.grad(lambda y: self.inner(y).square().sum())(x)
            return slope

    with pytest.raises(RuntimeError, match=r"memopt counts .* must not call torch.func.grad"):
        count(Slope(), torch.randn(3, 4))
