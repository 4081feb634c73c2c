"""Proves that a model can be planned, looked into and checked without the native library: the peak
that a plan predicts is the one that its step has, within budgets down to the floor.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, width)
        self.down = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for width in (32, 128, 64, 64)))


@pytest.fixture
def batch() -> Tensor:
    return torch.randn(64, 16)


def loss(output: Tensor) -> Tensor:
    return output.square().sum()


def gradients(model: nn.Module, batch: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss(model(batch)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_measured_peaks_are_the_predicted_ones(model: nn.Module, batch: Tensor) -> None:
    expected = gradients(model, batch)
    everything = memopt.plan(model, batch, "1GB", loss=loss)
    with pytest.raises(memopt.BudgetTooSmall) as error:
        everything.within(1)
    peaks = []
    for budget in (error.value.floor, (error.value.floor + everything.peak) // 2, everything.peak):
        plan = everything.within(budget).apply()
        assert plan.measured_peak == plan.peak <= budget
        peaks.append(plan.peak)
        torch.testing.assert_close(gradients(model, batch), expected, rtol=0, atol=0)
        plan.undo()
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]


def test_no_fate_needs_the_library(model: nn.Module, batch: Tensor) -> None:
    plan = memopt.plan(model, batch, "1GB", loss=loss, measure=False)
    names = [setting.name for setting in plan.pareto().settings]
    assert "recipes only" not in names
    assert "each block checkpointed" in names


def test_anatomy_check_and_the_largest_batch(model: nn.Module, batch: Tensor) -> None:
    plain = memopt.anatomy(model, batch, loss=loss, advice=True)
    assert "memopt.convert" not in str(plain)
    memopt.apply_activation_checkpointing(model)
    regions = memopt.anatomy(model, batch, loss=loss)
    assert regions.peak.total < plain.peak.total
    assert "everything that was asked took effect" in str(memopt.check(model, batch, loss=loss))
    memopt.unwrap(model)
    assert memopt.largest_batch(model, batch, "1MB", loss=loss) > 0
