"""Proves: a plan that is on its model holds no memory of the batch that it was made with, so that a
step of training, with a batch of its own, keeps to the budget by the allocator's count; and has the
batch again for what comes later, if somebody else has held it.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.memory.batches import Unheld
from memopt.memory.leaves import tensors_of_objects
from memopt.memory.storages import storages, tensors_in
from tests.support.allocator import allocated_by

WIDTH = 16


class OfNumbers(nn.Module):
    """Sums of what a chain makes of numbers, so that the batch is much of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def numbers() -> Tensor:
    return torch.randn(4096, WIDTH)


def applied() -> tuple[Any, nn.Module, torch.optim.Optimizer, Callable[[], Any]]:
    model = OfNumbers()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = numbers()
    plan = memopt.plan(model, batch, "1GiB", optimizer=optimizer, measure=False)
    plan = plan.within(int(0.7 * plan.plain_peak))
    plan = plan.within(plan.peak).apply()  # with nothing to spare
    return plan, model, optimizer, weakref.ref(batch)


def test_a_step_of_training_keeps_to_the_budget_beside_the_plan() -> None:
    """It was above by the bytes of the batch that the plan was made with."""
    plan, model, optimizer, planned_with = applied()

    def step() -> None:
        optimizer.zero_grad()
        model(numbers()).backward()
        optimizer.step()

    above = allocated_by(step)
    gc.collect()
    there = [*model.parameters(), *optimizer.state.values(), planned_with()]
    assert sum(storages(tensors_in(there)).values()) + above <= plan.budget


def test_what_is_asked_later_has_the_batch_where_somebody_holds_it() -> None:
    model, batch = OfNumbers(), numbers()
    plan = memopt.plan(model, batch, "1GiB", steps=1).apply()
    plan.run_step()
    plan.undo()
    lower = plan.within(int(0.8 * plan.plain_peak)).apply()
    assert lower.measured_peak is not None
    lower.undo()


def test_what_is_asked_later_is_predicted_where_nobody_does() -> None:
    plan, *_ = applied()
    with pytest.raises(ValueError, match=r"^Plan.run_step: .* got one without values"):
        plan.run_step()
    plan.undo()
    budget = int(0.8 * plan.plain_peak)
    lower = plan.within(budget)
    assert lower.peak <= budget
    assert lower.largest_batch("1GB") > 4096
    assert lower.apply().measured_peak is None
    lower.undo()


def test_a_batch_lives_as_long_as_its_plan_is_not_on_the_model() -> None:
    model, batch = OfNumbers(), numbers()
    plan = memopt.plan(model, batch, "1GiB", measure=False)
    here = weakref.ref(batch)
    del batch
    gc.collect()
    assert here() is not None
    plan.apply()
    gc.collect()
    assert here() is None


class Inputs(OfNumbers):
    """Asks for values of the batch, which predictions know while it is there."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.sum()) < 1e9 else 2 * x)


def test_a_model_whose_steps_look_at_values_needs_the_batch() -> None:
    model, batch = Inputs(), numbers()
    plan = memopt.plan(model, batch, "1GiB", measure=False).apply()
    plan.undo()
    plan.within("900MB")  # no assertion, which would have pytest hold what locals() are
    del batch
    plan.apply()
    gc.collect()
    plan.undo()
    with pytest.raises(ValueError, match=r"^Plan.within: the batch .* must still be there"):
        plan.within("900MB")


class Graphs:
    """Rows and targets, as torch_geometric's Data holds them: not in attributes of its own."""

    def __init__(self, **entries: Tensor) -> None:
        self.store = SimpleNamespace(entries=entries)


@dataclasses.dataclass
class Rows:
    x: Tensor
    y: Tensor


class OfObjects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = OfNumbers()

    def forward(self, batch: Any) -> Tensor:
        held = batch.store.entries if isinstance(batch, Graphs) else vars(batch)
        return (self.inner(held["x"]) - held["y"]).square().mean()


@pytest.mark.parametrize("kind", [Rows, Graphs, SimpleNamespace])
def test_a_batch_that_is_an_object(kind: Callable[..., Any]) -> None:
    """What PyTorch cannot take apart was refused. It is cut where it is a dataclass, and all else
    is known of it.
    """

    def made() -> Any:
        return kind(x=torch.randn(30, 50, 16), y=torch.randn(30, 50, 16))

    model, batch = OfObjects(), made()
    report = memopt.anatomy(model, batch, optimizer=None, measure=True)
    assert report.measured is not None
    assert report.peak.total == report.measured.peak.total
    assert "batch of 30" in str(report)
    with pytest.raises(memopt.BudgetTooSmall) as error:
        memopt.plan(model, made(), 1000, optimizer=None, steps=1, chunks=False)
    floor = error.value.floor
    plan = memopt.plan(model, batch, floor, optimizer=None, steps=1, chunks=False).apply()
    assert plan.measured_peak is not None
    assert plan.measured_peak <= floor < report.peak.total
    plan.undo()
    assert plan.within(floor + 1000).peak <= floor + 1000
    if kind is Rows:
        assert memopt.accumulate(model, made(), micro_batch=4).micro_batches == 8
        return
    with pytest.raises(ValueError, match="a tensor with a first dimension, got none"):
        memopt.accumulate(model, made(), micro_batch=4)


@pytest.mark.parametrize("kind", [Rows, Graphs, SimpleNamespace])
def test_objects_are_not_held(kind: Callable[..., Any]) -> None:
    """What is left has their shapes, and takes part in predictions."""
    batch = kind(x=torch.randn(30, 50, 16), y=torch.randn(30, 50, 16))
    held = weakref.ref(batch.store.entries["x"] if kind is Graphs else batch.x)
    unheld = Unheld(batch)
    if kind is not SimpleNamespace:  # to which nothing can refer weakly
        assert unheld.found() is batch
    del batch
    gc.collect()
    assert held() is None
    assert unheld.found() is None
    left = unheld.without_values
    assert all(tensor.is_meta for tensor in tensors_of_objects(left))
    plan = memopt.plan(OfObjects(), left, 1 << 30, optimizer=None, device="cpu")
    assert plan.peak > 0
