"""Proves: memopt.fit trains with whole batches within a budget that they do not fit in: the peak is
within it, and gradients are those of the whole batch but for rounding.
"""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import memopt
from memopt._plan.choices import LEAST
from memopt.applied import assigned
from memopt.assignment import Assignment
from memopt.memory.peak import bytes_here
from memopt.memory.step import Step
from tests.plan.models import Chain, chain, tokens
from tests.plan.support import allocated_above, looks

EVERYTHING = 1 << 30


def test_the_whole_batch_fits() -> None:
    model, batch = chain()
    fitted = memopt.fit(
        model, batch, EVERYTHING, optimizer=torch.optim.AdamW(model.parameters()), steps=1
    )
    assert (fitted.micro_batch, fitted.micro_batches) == (4, 1)
    fitted.undo()


def test_in_micro_batches() -> None:
    """Twelve rows where five would fit: three micro-batches of four, and not two of five and one of
    two.
    """
    torch.manual_seed(0)
    model, batch = Chain([4] * 4), tokens(12, 64)
    before = looks(model)
    model(batch).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters())
    whole = memopt.plan(model, batch, EVERYTHING, optimizer=optimizer, measure=False)
    budget = whole.profile.base + (whole.plain_peak - whole.profile.base) // 6
    fitted = memopt.fit(model, batch, budget, optimizer=optimizer, steps=1)
    assert 1 < fitted.micro_batches <= 12
    assert fitted.micro_batch == -(-12 // fitted.micro_batches)
    assert repr(fitted).startswith(f"Fitted(Chain, micro_batch={fitted.micro_batch}, ")
    assert fitted.plan.measured_peak is not None
    assert fitted.plan.measured_peak <= budget
    split = f"micro-batches of {fitted.micro_batch} rows, {fitted.micro_batches} for a batch"
    assert str(fitted).splitlines()[1] == split
    assert f"<p>{split}</p>" in fitted._repr_html_()
    assert "<th>Block</th>" in fitted._repr_html_()
    result = fitted(batch)
    assert result.micro_batches == fitted.micro_batches
    assert result.loss.item() == pytest.approx(whole.live.step.model(batch).item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)
    fitted.undo()
    assert looks(model) == before


@pytest.mark.slow
def test_blocks_that_share_regions_leave_room_for_more_rows() -> None:
    """Fit took each block for a region of its own: ten inputs of blocks where a region for several
    keeps some four, so that it split batches which a plan fits, and refused budgets.
    """
    torch.manual_seed(0)
    model, batch = Chain([1] * 10, words=10), tokens(8, 32) % 10
    options: Any = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "steps": 1}
    with pytest.raises(memopt.BudgetTooSmall) as told:
        memopt.plan(model, batch, 1000, measure=False, **options)
    floor = told.value.floor
    each_alone = Assignment({(f"blocks.{n}",): LEAST for n in range(10)})
    with assigned(model, each_alone):
        alone = bytes_here(Step(model, batch, None, who="test")) + allocated_above(model, batch)
    assert floor < 0.75 * alone
    fitted = memopt.fit(model, batch, floor, **options)
    assert fitted.micro_batches == 1
    assert fitted.plan.measured_peak is not None
    assert fitted.plan.measured_peak <= floor
    fitted.undo()
    with pytest.raises(memopt.BudgetTooSmall) as told:
        memopt.fit(model, batch, 1000, **options)
    least = told.value.floor
    assert least < floor
    fitted = memopt.fit(model, batch, least, **options)
    assert fitted.micro_batch == 1
    assert fitted.plan.measured_peak is not None
    assert fitted.plan.measured_peak <= least
    fitted.undo()


@pytest.mark.slow
def test_not_even_one_row() -> None:
    model, batch = chain()
    before = looks(model)
    with pytest.raises(memopt.BudgetTooSmall, match="the floor, got"):
        memopt.fit(model, batch, "200KB", optimizer=torch.optim.AdamW(model.parameters()))
    assert looks(model) == before


def test_a_larger_batch_is_warned_of() -> None:
    model, batch = chain()
    optimizer = torch.optim.AdamW(model.parameters())
    fitted = memopt.fit(model, batch, EVERYTHING, optimizer=optimizer, steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted(batch)
        fitted(batch[:2])
    with pytest.warns(UserWarning, match=r"Fitted: a batch must be no larger than .* 2,048 B, got"):
        fitted(torch.cat([batch, batch]))


def test_bad_input() -> None:
    model, batch = chain()
    with pytest.raises(ValueError, match=r"^fit: budget must be bytes"):
        memopt.fit(model, batch, "plenty", optimizer=torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="batch must hold a tensor"):
        memopt.fit(model, {}, "1GB", optimizer=torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize(
    ("weight", "said"),
    [("words", "fit: weight must be"), ("tokens", "fit: weight=.* a batch that maps 'labels'")],
)
def test_a_weight_that_cannot_count_is_refused_before_the_plan(weight: Any, said: str) -> None:
    """It was refused by the first batch of training, with the plan on the model."""
    model, batch = chain()
    before = looks(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises((TypeError, ValueError), match=said):
        memopt.fit(model, batch, EVERYTHING, optimizer=optimizer, weight=weight)
    assert looks(model) == before


def normed() -> tuple[nn.Module, torch.Tensor]:
    """Takes no single row."""
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 16))
        for _ in range(3)
    )
    return nn.Sequential(*blocks), torch.randn(16, 16)


def test_the_fewest_rows_that_the_model_takes() -> None:
    """It was said to take the whole batch alone. The floor that is named is one."""
    model, batch = normed()
    optimizer = torch.optim.SGD(model.parameters())
    options: Any = {"optimizer": optimizer, "loss": lambda y: y.square().mean(), "steps": 1}
    with pytest.raises(
        memopt.BudgetTooSmall, match=r"^fit: budget must be at .*, the floor"
    ) as told:
        memopt.fit(model, batch, 40_000, **options)
    plan = memopt.plan(
        model, batch[:4], told.value.floor, micro_batches=2, measure=False, **options
    )
    assert plan.peak <= told.value.floor


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


@pytest.mark.parametrize("rows", [16, 512])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_the_floor_that_is_named_is_accepted(
    optimizer: type[torch.optim.Optimizer], rows: int
) -> None:
    """It was a plan's, and `fit` refused it for the bytes of one row."""
    model = nn.Sequential(nn.Linear(64, 64), *(Residual(64) for _ in range(4)))
    options: Any = {
        "optimizer": optimizer(model.parameters(), lr=0.01),  # type: ignore[call-arg]
        "loss": lambda y: y.square().mean(),
        "steps": 1,
    }
    with pytest.raises(memopt.BudgetTooSmall) as told:
        memopt.fit(model, torch.randn(rows, 64), 1000, **options)
    fitted = memopt.fit(model, torch.randn(rows, 64), told.value.floor, **options)
    assert fitted.plan.peak <= told.value.floor
    fitted.undo()


def test_the_sample_does_not_stay() -> None:
    """It was there beside the batches of training, which the budget has one of."""
    model, batch = chain()
    sample = batch.clone()
    fitted = memopt.fit(
        model, sample, EVERYTHING, optimizer=torch.optim.SGD(model.parameters()), steps=1
    )
    memory = StorageWeakRef(sample.untyped_storage())
    del sample
    gc.collect()
    assert memory.expired()
    fitted(batch)
    fitted.undo()
    assert fitted.plan.within(EVERYTHING).plain_peak == fitted.plan.plain_peak
    fitted.plan.apply().undo()
    with pytest.raises(ValueError, match=r"^Plan.run_step: .* without values"):
        fitted.plan.run_step()
