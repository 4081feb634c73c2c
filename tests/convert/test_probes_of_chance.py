"""Proves: a module that draws random numbers is no activation and no norm, whatever it computes in
most calls: it stays, also in a plan's predictions.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt.memory.draws import LARGEST, LEAST, End, drawn_at


class OfPython(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x if random.random() < 1e-5 else F.gelu(x)


class OfTorch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x if torch.rand(1) < 1e-5 else F.gelu(x)


class ChanceNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (8,), self.weight, 1e-6) * (1 if random.random() > 1e-5 else 2)


class Often(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(-1) if torch.rand(1) < 0.5 else F.gelu(x)


class OftenShuffled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        order = [1, -1]
        random.shuffle(order)
        return F.silu(x) * order[0]


@pytest.mark.parametrize("kind", [OfPython, OfTorch, ChanceNorm, Often, OftenShuffled])
def test_it_stays(kind: type[nn.Module]) -> None:
    numbers, of_python = torch.get_rng_state(), random.getstate()
    assert memopt.convert(nn.Sequential(kind())).swapped == ()
    assert torch.equal(torch.get_rng_state(), numbers)
    assert random.getstate() == of_python


@pytest.mark.parametrize("end", [LEAST, LARGEST])
@pytest.mark.parametrize("kind", [Often, OftenShuffled])
def test_it_stays_in_predictions(kind: type[nn.Module], end: float) -> None:
    """They have random numbers at an end of their range, and no generator moves for them."""
    with drawn_at(End(end)):
        assert memopt.convert(nn.Sequential(kind())).swapped == ()
