"""Proves: what runs for a measurement, a sample, a prediction or a plan leaves nothing behind. All
that is reachable from the model, the batch, the loss and the optimizer has the same bits, is the
same objects and has the same version counters, also after an error in the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import memopt
from memopt.memory.attribution import attribute
from tests.memory.modules import HABITS, WIDTH, Habit, Model, weighted_loss
from tests.support.fingerprint import Fingerprint

Run = Callable[[nn.Module, Any, Any, Any], object]
ROOM = 1 << 30


def saves(model: nn.Module, batch: Any, loss: Any, optimizer: Any) -> None:
    memopt.saved_bytes(lambda: loss(model(**batch)))


def converts(model: nn.Module, batch: Any, loss: Any, optimizer: Any) -> None:
    memopt.convert(model, batch)
    memopt.revert(model)


def attributes(model: nn.Module, batch: Any, loss: Any, optimizer: Any) -> None:
    attribute(model, (), batch)


def predicts(model: nn.Module, batch: Any, loss: Any, optimizer: Any) -> None:
    memopt.anatomy(model, batch, loss=loss, optimizer=optimizer, measure=False)


def measures(model: nn.Module, batch: Any, loss: Any, optimizer: Any) -> None:
    memopt.anatomy(model, batch, loss=loss, optimizer=optimizer, measure=True)


def plans(model: nn.Module, batch: Any, loss: Any, optimizer: Any) -> None:
    plan = memopt.plan(model, batch, ROOM, loss=loss, optimizer=optimizer, steps=1)
    plan.apply()
    plan.run_step()
    plan.undo()


def fits(model: nn.Module, batch: Any, loss: Any, optimizer: Any) -> None:
    memopt.fit(model, optimizer, batch, ROOM, loss=loss, steps=1).undo()


def searches(model: nn.Module, batch: Any, loss: Any, optimizer: Any) -> None:
    memopt.largest_batch(model, batch, ROOM, loss=loss, optimizer=optimizer, limit=2)


RUNS: tuple[Run, ...] = (*(saves, converts, attributes, predicts, measures, plans, fits, searches),)


def made(
    habits: list[list[type[Habit]]], primed: bool = False, **options: Any
) -> tuple[nn.Module, dict[str, Any], Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model(habits, **options)
    batch = {"x": torch.randn(4, WIDTH), "notes": []}
    loss = weighted_loss()
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    if primed:
        loss(model(**batch)).backward()
        optimizer.step()  # states, and gradients that are there
    return model, batch, loss, optimizer


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_nothing_changes(run: Run, habit: type[Habit]) -> None:
    model, batch, loss, optimizer = made([[habit], [habit]])
    before = Fingerprint(model, batch, loss, optimizer)
    run(model, batch, loss, optimizer)
    assert Fingerprint(model, batch, loss, optimizer).differences(before) == []


@settings(max_examples=6, phases=(Phase.explicit, Phase.generate))
@given(
    habits=st.lists(st.lists(st.sampled_from(HABITS), max_size=3), min_size=2, max_size=3),
    primed=st.booleans(),
    runs=st.lists(st.sampled_from(RUNS), min_size=1, max_size=2, unique=True),
)
def test_nothing_changes_in_random_models(
    habits: list[list[type[Habit]]], primed: bool, runs: list[Run]
) -> None:
    things = made(habits, primed)
    before = Fingerprint(*things)
    for run in runs:
        run(*things)
    assert Fingerprint(*things).differences(before) == []
