"""Proves: where a kernel chooses its scratch itself, and a call would take too long to measure it,
a plan counts a bound of it, and says how much of the peak that is; else it says nothing.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.memory.scratch import measured


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x)[0]


def recurrent() -> tuple[nn.Module, Tensor]:
    return Net(*(Recurrent() for _ in range(3))), torch.randn(15, 6, 24)


def convolutions() -> tuple[nn.Module, Tensor]:
    blocks = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU()) for _ in range(3))
    return Net(*blocks), torch.randn(2, 8, 16, 16)


def linears() -> tuple[nn.Module, Tensor]:
    return Net(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))), torch.randn(4, 8)


@pytest.mark.parametrize(
    ("make", "is_bound"), [(recurrent, True), (convolutions, True), (linears, False)]
)
@pytest.mark.parametrize("is_quick", [True, False])
def test_a_plan_names_the_bound_in_its_peak(
    make, is_bound: bool, is_quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_quick:
        monkeypatch.setattr(measured, "_QUICK", 0)
    is_bound = is_bound and not is_quick
    model, x = make()
    plan = memopt.plan(model, (x,), measure=False, device="cpu")
    margin = memopt.anatomy(model, (x,)).peak.margin
    assert (margin > 0) == is_bound
    assert any("a bound of kernels' scratch" in note for note in plan.notes) == is_bound
