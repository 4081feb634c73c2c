"""Proves: with a place to offload to, a plan may go below the floor of those without; what it says
that it offloads is what the engine copies, to the byte; and results stay the same in every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import memopt
from memopt.applied import assigned
from memopt.assignment import Choice
from memopt.memory.sizes import BudgetTooSmall, as_text
from tests.plan.models import Chain, tokens
from tests.plan.support import gradients, looks, without_regions


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Chain, Any, memopt.Plan]:
    """A chain whose tensors are large enough to travel, and its plan for a link that is faster than
    any, so that it does not depend on the machine what travels.
    """
    torch.manual_seed(0)
    model, batch = Chain([4] * 6, features=32), tokens(16, 64)
    directory = Path(tmp_path_factory.mktemp("away"))
    plan = memopt.plan(model, batch, 1 << 30, measure=False, offload=directory, chunks=False)
    plan.terms = replace(plan.terms, out=1e15, back=1e15)
    return model, batch, plan


def offloading(planned: tuple[Chain, Any, memopt.Plan]) -> memopt.Plan:
    """Of plans for ever less, the first that offloads something."""
    _, _, plan = planned
    for part in range(30, 4, -1):
        found = plan.within(plan.plain_peak * part // 40)
        if any(block.away for block in found.blocks):
            return found
    raise AssertionError("no plan offloads")


def test_goes_where_it_says(planned: tuple[Chain, Any, memopt.Plan]) -> None:
    """The engine's own count of a step, block by block."""
    model, batch, _ = planned
    plan = offloading(planned)
    assert plan.peak <= plan.budget
    plan.apply(watch=False)
    before = memopt.offload.stats(wait=True).bytes_out
    model(batch).backward()
    moved = memopt.offload.stats(wait=True).bytes_out - before
    plan.undo()
    model.zero_grad()
    assert moved == sum(block.away for block in plan.blocks)
    assert moved > 0


def test_its_page_says_what_the_drawing_leaves_out(planned: tuple[Chain, Any, memopt.Plan]) -> None:
    """What waits elsewhere is drawn, and the plan's peak stands beside."""
    _, _, rich = planned
    plan = offloading(planned)
    away = sum(block.away for block in plan.blocks)
    text = plan.to_html()
    assert f"as if the {as_text(away)} that wait elsewhere stayed" in text
    assert f"without them the peak is {as_text(plan.peak)}." in text
    assert "Drawn as if" not in rich.to_html()


def test_bits_stay(planned: tuple[Chain, Any, memopt.Plan]) -> None:
    model, batch, _ = planned
    plan = offloading(planned)
    with assigned(model, without_regions(plan)):
        expected = gradients(model, batch)
    plan.apply(watch=False)
    found = gradients(model, batch)
    plan.undo()
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.slow
def test_goes_below_the_floor(planned: tuple[Chain, Any, memopt.Plan]) -> None:
    """Less than the least that plans without offloading can do, and the watched step says so. (The
    ledger sees memory go when the engine has copied it.)
    """
    model, batch, plan = planned
    with pytest.raises(memopt.BudgetTooSmall) as info:
        memopt.plan(model, batch, 1000, measure=False, chunks=False)
    with pytest.raises(memopt.BudgetTooSmall) as with_offload:
        plan.within(1000)
    assert with_offload.value.floor < info.value.floor


def test_shares_add_up() -> None:
    """A quarter is the first storages in the order of saving that fit in a quarter of what has been
    offered, as memopt.offload(fraction=) takes them.
    """
    from memopt._plan.bytes import StageBytes

    cost = StageBytes(0, 0, 0, 0, may_leave=(100, 100, 100, 100, 800))
    assert [cost.away(share) for share in (0, 0.25, 0.5, 1)] == [0, 100, 200, 1200]
    assert str(Choice(recipes=True, offload=0.25)) == "recipes + offload 25%"
    assert str(Choice(checkpoint=True, offload=1.0)) == "checkpoint + offload"


def test_a_link_is_measured(tmp_path: Path) -> None:
    """Both ways, by copies that are made for it; and nothing of them stays."""
    from memopt._plan.link import speeds_to

    speeds = speeds_to(tmp_path, torch.device("cpu"), runs=True)
    assert min(speeds) > 1e6
    assert sum(place.bytes_away for place in memopt.offload.stats(wait=True).places) == 0


@pytest.fixture
def copies() -> Iterator[Callable[[int], None]]:
    """Sets how many copies may be under way; afterwards it is the default."""
    yield lambda number: memopt.offload.configure(copies_in_flight=number)
    memopt.offload.configure()


def test_copies_under_way_are_those_of_the_settings(
    planned: tuple[Chain, Any, memopt.Plan], copies: Callable[[int], None], tmp_path: Path
) -> None:
    """What is on its way back takes memory: with more copies the floor is higher."""
    model, batch, _ = planned
    copies(2)
    plan = memopt.plan(model, batch, 1 << 30, measure=False, offload=tmp_path, chunks=False)
    assert plan.terms.copies_in_flight == 2
    floors = []
    for number in (1, 2, 4):
        copies(number)
        assert plan.within(1 << 30).terms.copies_in_flight == number
        with pytest.raises(BudgetTooSmall) as error:
            plan.within(1000)
        floors.append(error.value.floor)
    assert floors == sorted(floors)
    assert floors[0] < floors[-1]


@pytest.mark.parametrize("loaded", [False, True], ids=["own", "loaded"])
@pytest.mark.parametrize("now", [1, 8])
def test_other_settings_than_the_plan_s_are_refused(
    planned: tuple[Chain, Any, memopt.Plan],
    copies: Callable[[int], None],
    tmp_path: Path,
    now: int,
    loaded: bool,
) -> None:
    """Of a plan that offloads. Nothing is on the model then, and another plan is at hand."""
    model, batch, _ = planned
    plan = offloading(planned)
    copies(now)
    if loaded:
        plan.save(tmp_path / "plan.json")
        plan = memopt.Plan.load(tmp_path / "plan.json")
    before = looks(model)
    with pytest.raises(ValueError, match=rf"Plan.apply: copies_in_flight must be .* 4, got {now} "):
        plan.apply(model, watch=False)
    assert looks(model) == before
    if not loaded:
        again = plan.within(plan.budget * 2)
        again.apply(watch=False)
        again.undo()
    stays = memopt.plan(model, batch, 1 << 30, measure=False, chunks=False)
    stays.apply(watch=False)  # it copies nothing
    stays.undo()
