"""Proves: a plan may make parts of a block regions, or give consecutive blocks one region. So at
the same peak less time is added than with whole blocks alone, and the floor lies below that of
every block as a region. Predicted peaks are the allocator's, and gradients have the plain bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt._plan import live as live_module
from memopt._plan.choices import CHOICES, LEVELS, WITH_PARTS
from memopt._plan.plan import Plan
from memopt._plan.solver import solve
from memopt._plan.terms import Terms, evaluated, problem, uniform
from memopt.applied import assigned
from memopt.assignment import Choice
from tests.plan.models import Block
from tests.plan.support import (
    allocated_above,
    gradients,
    looks,
    planned_or_refused,
    without_regions,
)

WIDTH = 16


class Attention(nn.Module):
    """The scores are kept: many bytes for little work."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        out: Tensor = self.out((q @ k.mT).softmax(-1) @ v)
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), Block(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(x + self.attention(self.norm(x)))
        return out


class Decoder(nn.Module):
    """A loop over its layers, as most code has it."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, torch.zeros_like(x))


def decoder() -> tuple[Decoder, Tensor]:
    torch.manual_seed(0)
    return Decoder(12), torch.randn(2, 128, WIDTH)


@pytest.fixture(scope="module")
def held() -> tuple[Decoder, Tensor]:
    """The batch too, which a plan that was on its model holds no more."""
    return decoder()


@pytest.fixture(scope="module")
def rich(held: tuple[Decoder, Tensor]) -> Plan:
    return memopt.plan(*held, 1 << 30, measure=False, optimizer=None)


@pytest.fixture(scope="module")
def floor(rich: Plan) -> int:
    _, error = planned_or_refused(rich, rich.profile.base + 1)
    assert error is not None
    return error.floor


def of_whole_blocks(plan: Plan, budget: int) -> float:
    """The least time within a budget without parts and without regions of several blocks."""
    return solve(problem(plan.profile, plan.terms, CHOICES, with_recipes=False), budget).seconds


def measured(plan: Plan) -> int:
    assert plan.live is not None
    step = plan.live.step
    with assigned(step.model, plan.assignment):
        return allocated_above(step.model, step.batch) + plan.profile.base


def test_attention_goes_before_the_rest_of_its_block(rich: Plan) -> None:
    """It has most bytes per second of recompute."""
    parts = set(rich.profile.parts.values())
    assert len(parts) == 1
    (mine,) = parts
    assert mine.levels == (("attention",), ("attention", "mlp"))
    assert mine.inside == ("attention", "mlp")


@pytest.mark.parametrize("share", [0.75, 0.5])
def test_parts_take_less_than_whole_blocks(rich: Plan, share: float) -> None:
    budget = int(share * rich.plain_peak)
    plan = rich.within(budget)
    assert any(choice.parts for choice in plan.assignment.choices.values())
    assert measured(plan) == plan.peak <= budget
    whole = of_whole_blocks(rich, budget)
    assert plan.seconds < whole


def test_the_floor_is_below_every_block_checkpointed() -> None:
    """Where inputs of regions are the most of it: many rows, small layers."""
    torch.manual_seed(0)
    model, batch = Decoder(), torch.randn(32, 16, WIDTH)
    rich = memopt.plan(model, batch, 1 << 30, measure=False, optimizer=None)
    region = uniform(rich.profile, Choice(recipes=True, checkpoint=True), Terms())
    plan, error = planned_or_refused(rich, rich.profile.base + 1)
    assert error is not None
    plan = rich.within(error.floor)
    inputs = len(model.layers) * batch.nbytes
    assert plan.peak < region.peak - inputs // 3
    assert measured(plan) == plan.peak == error.floor
    shared = [at for at in plan.assignment.choices if len(at) > 1]
    assert shared
    together = {block.path: block.together for block in plan.blocks}
    assert all(together[path] == at for at in shared for path in at)
    assert any("one region" in row[1] for row in plan.tables().sections[0].rows)


def test_blocks_without_the_same_parts_share_no_region_with_parts_inside() -> None:
    """Layers with attention and without one in turns."""
    torch.manual_seed(0)
    model, batch = Decoder(0), torch.randn(32, 16, WIDTH)
    model.layers.extend(kind for _ in range(3) for kind in (Layer(), Block(WIDTH)))
    rich = memopt.plan(model, batch, 1 << 30, measure=False, optimizer=None)
    _, error = planned_or_refused(rich, rich.profile.base + 1)
    assert error is not None
    plan = rich.within(error.floor)
    assert measured(plan) == plan.peak == error.floor


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_bits_json_and_undo(rich: Plan, floor: int, share: float, tmp_path: Path) -> None:
    plan = rich.within(max(floor, int(share * rich.plain_peak)))
    assert plan.live is not None
    model, batch = plan.live.step.model, plan.live.step.batch
    before = looks(model)
    with assigned(model, without_regions(plan)):
        expected = gradients(model, batch)
    plan.apply()
    assert plan.measured_peak == plan.peak
    found = gradients(model, batch)
    plan.undo()
    assert looks(model) == before
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.assignment.choices == plan.assignment.choices
    assert str(loaded) == str(plan)
    other, _ = decoder()
    loaded.apply(other)
    found = gradients(other, batch)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_steps_are_no_more_than_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of alike blocks a few show all: their number does not grow with the blocks'."""
    asked: list[Any] = []
    predicted = live_module.predicted

    def counted(*args: Any, **options: Any) -> Any:
        asked.append(args)
        return predicted(*args, **options)

    monkeypatch.setattr(live_module, "predicted", counted)
    model, batch = Decoder(24), torch.randn(2, 8, WIDTH)
    profile = memopt.plan(model, batch, 1 << 30, measure=False).profile
    assert len(asked) <= 6
    asked.clear()
    memopt.plan(Decoder(2), batch, 1 << 30, measure=False)
    assert len(asked) <= len(CHOICES) + len(WITH_PARTS) + 4
    assert {choice.parts for _, choice in profile.nbytes} >= {("mlp",), ("attention", "mlp")}


def test_names_of_sets_never_reach_a_model(rich: Plan) -> None:
    for number, choice in enumerate(rich.terms.every[: len(rich.terms.choices)]):
        numbers = [0, *(number for _ in rich.profile.paths), 0]
        assert evaluated(rich.profile, rich.terms, numbers).peak > 0
        allowed = rich.profile.allowed(rich.profile.paths[0], choice)
        assert set(allowed.parts).isdisjoint(LEVELS)
