"""Proves: however a model calls its blocks, `plan` returns after a bounded number of looks, with a
plan that holds: what is measured is within the budget, and bits stay.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._plan import live as live_module
from memopt._plan.choices import CHOICES, WITH_PARTS
from memopt._plan.terms import Terms, uniform
from memopt.applied import assigned
from memopt.assignment import KEEP, Choice
from memopt.memory.step import Step
from tests.plan.models import Block, chain
from tests.plan.strangers import STRANGERS, Forces, Siamese, Target, Teacher, batch
from tests.plan.support import gradients, looks, planned_or_refused, without_regions


@pytest.mark.parametrize("name", STRANGERS)
def test_plans_of_models_that_call_blocks_otherwise(name: str) -> None:
    torch.manual_seed(0)
    model, x = STRANGERS[name](), batch()
    before = looks(model)
    plan = memopt.plan(model, x, 1 << 30, measure=False)
    for part in (9, 7):
        found, error = planned_or_refused(plan, plan.plain_peak * part // 10)
        if error is not None:
            found = plan.within(error.floor)
            assert found.peak <= error.floor
        assert found.peak <= found.budget
        with assigned(model, without_regions(found)):
            expected = gradients(model, x)
        found.apply()
        assert found.measured_peak is not None
        assert found.measured_peak <= found.budget
        same = gradients(model, x)
        found.undo()
        assert same.keys() == expected.keys()
        assert all(torch.equal(same[name], expected[name]) for name in same)
    assert looks(model) == before


@pytest.mark.parametrize("name", ["target first", "siamese", "crops", "two passes", "single"])
def test_looks_are_no_more_than_choices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    predicted = live_module.predicted

    def counted(*args: Any, **options: Any) -> Any:
        asked.append(args)
        return predicted(*args, **options)

    monkeypatch.setattr(live_module, "predicted", counted)
    model = STRANGERS[name]()
    step = Step(model, batch(), torch.optim.SGD(model.parameters(), 0.1), who="a test")
    profile = live_module.Live(step, live_module.blocks_of(step, None, "cpu"), "cpu", 0).profile()
    assert 2 <= len(asked) <= 1 + len(CHOICES) + len(WITH_PARTS)  # one shows the plain step
    known = {(site, choice) for site in profile.sites for choice in CHOICES}
    assert known <= profile.nbytes.keys()


def test_calls_without_gradients_are_no_stages() -> None:
    """Of blocks that run with and without, one call counts; blocks that never run with are named,
    and stay as they are.
    """
    plan = memopt.plan(Target(True), batch(), 1 << 30, measure=False)
    assert plan.profile.paths == tuple(f"tower.blocks.{n}" for n in range(4))
    plan = memopt.plan(Teacher(), batch(), 1 << 30, measure=False)
    assert plan.profile.paths == tuple(f"student.blocks.{n}" for n in range(4))
    assert "teacher.blocks.0" in plan.notes[0]
    assert "gradients enabled" in plan.notes[0]


@pytest.mark.parametrize("count", [3, 8])
def test_many_blocks_that_are_called_twice(count: int) -> None:
    """At every budget no slower than one choice for all that fits in it."""
    torch.manual_seed(0)
    model, x = Siamese(count), batch()
    plan = memopt.plan(model, x, 1 << 30, measure=False)
    settings = [uniform(plan.profile, choice, Terms()) for choice in CHOICES]
    least = min(one.peak for one in settings)
    for part in range(4):
        budget = least + (plan.plain_peak - least) * part // 3
        found, error = planned_or_refused(plan, budget)
        if error is not None:
            continue
        assert found.peak <= budget
        fitting = [one.seconds for one in settings if one.peak <= budget]
        assert all(found.seconds <= seconds * (1 + 1e-9) for seconds in fitting)
        assert {found.assignment.of(path) for path in found.profile.blocks} <= set(CHOICES)


def test_a_mixture_of_choices_for_blocks_that_are_called_twice() -> None:
    """Between the least and the most, some blocks are regions and some are not."""
    torch.manual_seed(0)
    plan = memopt.plan(Siamese(8), batch(), 1 << 30, measure=False)
    keeping, regions = (uniform(plan.profile, c, Terms()) for c in (KEEP, Choice(checkpoint=True)))
    found = plan.within((keeping.peak + regions.peak) // 2)
    assert len(set(found.assignment.choices.values())) > 1


STEPS = (n for n in itertools.count(1))  # a generator, which nobody can copy or put back


class Skips(nn.Module):
    """Another block is left out in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, _ = chain()

    def forward(self, ids: Tensor) -> Tensor:
        step = next(STEPS)
        x = self.inner.embed(ids)
        for number, block in enumerate(self.inner.blocks):
            if number != step % 6:
                x = block(x)
        return self.inner.head(x).square().mean()


def test_a_model_that_skips_blocks_at_random_is_refused_by_name() -> None:
    model = Skips()
    with pytest.raises(ValueError, match="must call the same blocks in every step"):
        memopt.plan(model, chain()[1], 1 << 30, measure=False)


def test_blocks_that_a_function_kept_by_the_model_calls() -> None:
    """It refers to the model itself, so that a prediction's copy does not call them: the plan is
    made of steps that ran.
    """

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(16) for _ in range(3))
            self.first = lambda x: self.blocks[0](x)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks[1:]:
                x = block(x)
            return x.square().mean()

    model, x = Model(), torch.randn(2, 8, 16)
    plan = memopt.plan(model, x)
    assert plan.profile.paths == ("blocks.0", "blocks.1", "blocks.2")
    plan.apply()
    model(x).backward()
    plan.undo()


def test_a_model_that_differentiates_in_its_forward() -> None:
    """It is probed with gradients, since without it raises."""
    model, x = Forces(), batch()
    expected = gradients(model, x)
    assert memopt.apply_activation_checkpointing(model, batch=x)
    same = gradients(model, x)
    assert all(torch.equal(same[name], expected[name]) for name in expected)
    memopt.unwrap(model)
    assert memopt.plan(model, x, 1 << 30, measure=False, chunks=False).blocks
