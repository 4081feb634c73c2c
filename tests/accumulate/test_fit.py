"""Proves that the largest batch and the longest sequence fit, and one more does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from tests.anatomy.models import Mlp, tiny


def test_the_largest_batch() -> None:
    model, sample = Mlp(blocks=1), torch.randn(1, 32)
    without: Any = {"optimizer": None}
    budget = memopt.anatomy(model, torch.randn(37, 32), **without).peak.total
    assert memopt.largest_batch(model, sample, budget, **without) == 37
    assert memopt.largest_batch(model, sample, budget - 1, **without) == 36
    assert memopt.largest_batch(model, sample, budget, limit=16, **without) == 16
    assert memopt.largest_batch(model, lambda n: torch.empty(n, 32), budget, **without) == 37


def test_not_even_one_row() -> None:
    model = Mlp(blocks=1)
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert memopt.largest_batch(model, torch.randn(2, 32), weights + 1) == 0


def test_the_largest_batch_of_a_step_of_ones_own() -> None:
    """What a step needs is what it makes and the weights that it reads: told by hand."""
    weight = torch.randn(32, 64, requires_grad=True)
    sizes = []

    def step(rows: int) -> None:
        sizes.append(rows)
        (torch.ones(rows, 32) @ weight).exp().sum().backward()
        weight.grad = None

    # When backward begins: the input, the product and its exponential, the sum, its gradient, and
    # the weight.
    def peak(rows: int) -> int:
        return 4 * (rows * (32 + 64 + 64) + 2 + 32 * 64)

    assert memopt.largest_batch(step, peak(1000)) == 1000
    assert len(sizes) < 12
    assert memopt.largest_batch(step, budget=peak(1000) - 1) == 999
    assert memopt.largest_batch(step, peak(1000), limit=7) == 7


def test_a_step_that_runs_out_of_memory_does_not_fit() -> None:
    def step(rows: int) -> None:
        if rows > 21:
            raise torch.OutOfMemoryError("for a test")

    assert memopt.largest_batch(step, 1 << 30) == 21


@pytest.mark.slow
def test_the_longest_sequence() -> None:
    model, batch = tiny("llama", rows=2, length=40)
    budget = memopt.anatomy(model, batch, optimizer=None).peak.total
    other = tiny("llama", rows=2, length=8)[1]
    assert memopt.longest_sequence(model, other, budget, optimizer=None) == 40
    model.config.max_position_embeddings = 24
    assert memopt.longest_sequence(model, other, budget, optimizer=None) == 24


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (ValueError, "largest_batch: budget must be above the", (torch.randn(2, 32), 5)),
        (
            ValueError,
            "largest_batch: budget must be bytes or a string",
            (torch.randn(2, 32), "lots"),
        ),
        (ValueError, "more than 0 dimensions, got none", ({"x": 3}, 1 << 30)),
    ],
)
def test_bad_input(error: type[Exception], words: str, arguments: tuple[Any, Any]) -> None:
    with pytest.raises(error, match=words):
        memopt.largest_batch(Mlp(), *arguments)


def test_a_step_without_a_budget() -> None:
    with pytest.raises(TypeError, match=r"largest_batch: budget must be bytes .*, got None"):
        memopt.largest_batch(lambda rows: None)


@pytest.mark.parametrize("size", [memopt.largest_batch, memopt.longest_sequence])
def test_a_model_that_is_none(size: Callable[..., int]) -> None:
    with pytest.raises(TypeError, match=f"{size.__name__}: model must be an nn.Module, got int"):
        size(3, torch.randn(2, 32), 1 << 30)


@pytest.mark.parametrize("size", [memopt.largest_batch, memopt.longest_sequence])
def test_a_device_that_nothing_is_predicted_for(size: Callable[..., int]) -> None:
    """As of anatomy and plan: it was taken for the CPU's by some of the rules, in silence."""
    with pytest.raises(ValueError, match=f"{size.__name__}: device must be .*, got 'tpu'"):
        size(Mlp(), torch.randn(2, 32), 1 << 30, device="tpu")


@pytest.mark.parametrize("size", [memopt.largest_batch, memopt.longest_sequence])
def test_a_limit_that_is_no_number(size: Callable[..., int]) -> None:
    with pytest.raises(TypeError, match=f"^{size.__name__}: limit must be an int .*, got 1.5"):
        size(Mlp(), torch.randn(2, 32), 1 << 30, limit=1.5)
    with pytest.raises(ValueError, match=r"^largest_batch: limit must be an int .*, got 0"):
        memopt.largest_batch(lambda rows: None, 1 << 30, limit=0)


class Looks(nn.Module):
    """Looks at a value, so that its steps are measured and not predicted."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if bool(x.sum() > 1e9) else x


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("least", [1, 2])
def test_a_budget_below_the_fewest_rows_is_refused(looks: bool, least: int) -> None:
    """It says what they take, with which it runs; nothing ran, and no gradient is there."""
    norms = [nn.BatchNorm1d(64)] if least == 2 else []
    model = nn.Sequential(nn.Linear(8, 64), *norms, nn.GELU(), *([Looks()] if looks else []))
    x, weights = torch.randn(16, 8), 4 * sum(p.numel() for p in model.parameters())
    with pytest.raises(
        memopt.BudgetTooSmall, match=r"^accumulate: budget must be at least the"
    ) as e:
        memopt.accumulate(model, x, loss=torch.mean, budget=weights + 64)
    assert ("one row" if least == 1 else "2 rows") in str(e.value)
    assert all(p.grad is None for p in model.parameters())
    assert memopt.accumulate(model, x, loss=torch.mean, budget=e.value.floor).micro_batch == least
    with pytest.raises(memopt.BudgetTooSmall):
        memopt.accumulate(copy.deepcopy(model), x, loss=torch.mean, budget=e.value.floor - 1)
