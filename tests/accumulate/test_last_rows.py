"""Proves that no single row is left for a last micro-batch where it need not be, in micro-batches
that are given, chosen, predicted and planned; and where it must be, that "auto" asks the model.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt

WIDTH = 2000


class Looks(nn.Module):
    """Looks at a value, so that its steps are measured and not predicted."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if bool(x.sum() > 1e9) else x


class Normed(nn.Module):
    """Takes no single row, and notes the rows that it was given."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH)
        self.last, self.looks = nn.Linear(WIDTH, 4), Looks() if looks else nn.Identity()
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        return self.last(self.looks(self.norm(self.first(x)).tanh().sin())).square().mean()


def budget_for(model: nn.Module, rows: int, whole: Tensor) -> int:
    """A budget that holds micro-batches of so many rows, and not of one more."""
    try:
        memopt.accumulate(copy.deepcopy(model), whole, budget=200_000)
    except memopt.BudgetTooSmall as error:
        return error.floor + (rows - 2) * 5 * 4 * WIDTH
    raise AssertionError


@pytest.mark.parametrize(
    ("rows", "size", "wanted"),
    [
        (13, 4, [4, 4, 3, 2]),
        (10, 3, [3, 3, 2, 2]),
        (12, 4, [4, 4, 4]),
        (11, 4, [4, 4, 3]),
        (4, 3, [2, 2]),
        (8, 9, [8]),
    ],
)
def test_the_last_micro_batch_has_two_rows(rows: int, size: int, wanted: list[int]) -> None:
    model = Normed()
    result = memopt.accumulate(model, torch.randn(rows, 4), micro_batch=size)
    assert model.rows == wanted
    assert (result.micro_batch, result.micro_batches) == (min(rows, size), len(wanted))


@pytest.mark.parametrize("looks", [False, True])
def test_auto_takes_no_size_that_the_last_row_refuses(looks: bool) -> None:
    """It took 4 of 13 rows, and raised the model's error behind three micro-batches."""
    torch.manual_seed(0)
    model, x = Normed(looks), torch.randn(13, 4)
    result = memopt.accumulate(model, x, budget=budget_for(model, 4, x))
    assert result.micro_batch >= 3
    assert min(model.rows[-result.micro_batches :]) >= 2


@pytest.mark.parametrize("looks", [False, True])
def test_two_rows_of_an_odd_number_are_refused_before_anything_ran(looks: bool) -> None:
    model = Normed(looks)
    with pytest.raises(memopt.BudgetTooSmall, match="in micro-batches of 3 rows"):
        memopt.accumulate(
            model, torch.randn(13, 4), budget=budget_for(model, 2, torch.randn(12, 4))
        )
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("micro_batches", [3, 4])
def test_predicted_and_planned_micro_batches(micro_batches: int) -> None:
    model, x = Normed(), torch.randn(10 if micro_batches == 4 else 7, 4)
    options: dict[str, Any] = {"micro_batches": micro_batches}
    assert memopt.anatomy(model, x, optimizer=None, **options).peak.total > 0
    memopt.plan(model, x, "1GiB", measure=False, **options).apply().undo()
