"""Proves: what is said below the floor adds up to it, names the phase of the peak, and hides behind
no error of the model's own; and a floor that was named is accepted.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._plan.choose import _at_worst, _largest
from memopt._plan.terms import evaluated
from memopt.assignment import KEEP, Choice
from memopt.memory.sizes import BudgetTooSmall
from tests.plan.models import Block, Chain, Spaced, tokens


def parts_of(error: BudgetTooSmall) -> tuple[str, dict[str, int]]:
    """The phase of the peak, and the bytes of each part of it, as they are said."""
    lines = str(error).splitlines()
    phase = re.fullmatch(r"  the floor's peak is in (.*):", lines[1])
    assert phase is not None, lines
    found = [re.fullmatch(r"    ([\d,.]+) (MB|B) of (.*)", line) for line in lines[2:]]
    parts = itertools.takewhile(lambda match: match is not None, found)
    units = {"MB": 10**6, "B": 1}
    return phase[1], {
        part[3]: int(float(part[1].replace(",", "")) * units[part[2]])
        for part in parts
        if part is not None
    }


def assert_adds_up(error: BudgetTooSmall, weights: int, states: int) -> str:
    """To what is said: sizes in MB have one digit. Returns the phase."""
    phase, parts = parts_of(error)
    digit = 10**5 / 2
    assert abs(sum(parts.values()) - error.floor) <= len(parts) * digit
    assert abs(parts["weights"] - weights) <= digit
    assert abs(parts.get("optimizer states", 0) - states) <= digit
    return phase


class Asks(nn.Module):
    """Looks at a value, so that its steps are watched."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.inner(ids)
        return loss if loss.item() > -1 else 2 * loss


def below(model: nn.Module, batch: Any, **options: Any) -> BudgetTooSmall:
    with pytest.raises(BudgetTooSmall) as info:
        memopt.plan(model, batch, 1000, measure=False, **options)
    return info.value


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, None])
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("wrap", [lambda model: model, Asks], ids=["predicted", "watched"])
def test_parts_add_up(wrap: Callable[[nn.Module], nn.Module], rows: int, optimizer: Any) -> None:
    """With the optimizer's states; and where its step is the peak the text says so."""
    torch.manual_seed(0)
    model = wrap(Chain([4] * 3, features=128))
    error = below(model, tokens(rows, rows), optimizer=optimizer)
    weights = sum(p.nbytes for p in model.parameters())
    states = 2 * weights if optimizer is torch.optim.AdamW else 0
    phase = assert_adds_up(error, weights, states)
    if rows == 64:
        assert phase == "backward"
    elif optimizer is torch.optim.AdamW:
        assert phase == "the optimizer's step"


def test_states_that_are_there_already_count_once() -> None:
    model, batch = Chain([4] * 3, features=128), tokens()
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    predicted, watched = (
        below(model, batch, optimizer=optimizer),
        below(Asks(model), batch, optimizer=optimizer),
    )
    weights = sum(p.nbytes for p in model.parameters())
    for error in (predicted, watched):
        assert_adds_up(error, weights, 2 * weights)


@pytest.mark.parametrize("wrap", [lambda model: model, Asks], ids=["predicted", "watched"])
def test_a_floor_that_was_named_is_accepted(wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    model, batch = wrap(Chain([1, 8, 2, 4])), tokens()
    error = below(model, batch)
    plan = memopt.plan(model, batch, error.floor, measure=True, steps=1)
    assert plan.peak <= error.floor
    plan.apply()
    assert plan.measured_peak is not None
    assert plan.measured_peak <= error.floor


class Fixed(nn.Module):
    """Takes one number of rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.inner, self.rows = Chain([4] * 3), rows

    def forward(self, ids: Tensor) -> Tensor:
        assert ids.shape[0] == self.rows
        return self.inner(ids)


def test_the_models_own_error_from_fewer_rows_does_not_come_out() -> None:
    """Below the floor, in `fit`, and with advice."""
    model, batch = Fixed(4), tokens()
    error = below(model, batch)
    assert "micro_batch" not in str(error)
    found = memopt.anatomy(model, batch, measure=False, advice=True)
    assert all("accumulate" not in advice.how for advice in found.advice)
    assert found.advice
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(BudgetTooSmall, match=r"takes no fewer rows.*AssertionError"):
        memopt.fit(model, batch, error.floor // 2, optimizer=optimizer)
    fitted = memopt.fit(model, batch, 1 << 30, optimizer=optimizer, steps=1)
    assert fitted.micro_batch == 4


def test_a_floor_does_not_depend_on_times(tmp_path: Path) -> None:
    """Whatever the link's pace was found to be when it is named, and when it is asked for."""
    torch.manual_seed(0)
    model, batch = Chain([4] * 8, features=64), tokens(32)
    options = {"offload": tmp_path, "chunks": False}
    plan = memopt.plan(model, batch, 1 << 30, measure=True, steps=1, **options)
    floors = set()
    for pace in (1e3, 1e9, 1e15):
        plan.terms = replace(plan.terms, out=pace, back=pace)
        with pytest.raises(BudgetTooSmall) as info:
            plan.within(1000)
        floors.add(info.value.floor)
    assert len(floors) == 1
    for pace in (1e3, 1e9, 1e15):
        plan.terms = replace(plan.terms, out=pace, back=pace)
        assert plan.within(*floors).peak <= max(floors)


def test_offloading_keeps_its_budget_in_every_step(tmp_path: Path) -> None:
    """The floor is below the one without it, is accepted, and holds by the allocator's count."""
    from memopt.memory.allocator import LiveBytes

    torch.manual_seed(0)
    model, batch = Spaced([4] * 8, features=64), tokens(32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options: dict[str, Any] = {"optimizer": optimizer, "chunks": False}
    without = below(model, batch, **options)
    options["offload"] = tmp_path
    error = below(model, batch, **options)
    assert error.floor < without.floor
    assert_adds_up(error, sum(p.nbytes for p in model.parameters()), 0)
    plan = memopt.plan(model, batch, error.floor, steps=1, **options)
    assert any(block.away for block in plan.blocks)
    assert plan.assignment.in_step
    assert any("waits at its end until what it offloads has left" in n for n in plan.notes)
    plan.save(tmp_path / "plan.json")
    assert memopt.Plan.load(tmp_path / "plan.json").assignment.in_step
    plan.apply()
    assert plan.measured_peak is not None
    assert plan.measured_peak <= error.floor
    model(batch).backward()
    optimizer.zero_grad()
    for _ in range(4):
        with LiveBytes() as live:
            model(batch).backward()
        optimizer.zero_grad()
        assert plan.profile.base + live.most <= error.floor
    plan.undo()
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())


def test_without_room_for_late_copies_nothing_leaves_between_blocks(tmp_path: Path) -> None:
    """Nor while backward runs, however slow the link is: here another copy is before theirs."""
    torch.manual_seed(0)
    model, batch = Spaced([4] * 8, features=64), tokens(32)
    options = {"optimizer": None, "offload": tmp_path, "chunks": False}
    floor = below(model, batch, **options).floor
    plan = memopt.plan(model, batch, floor, measure=False, **options)
    plan.apply(watch=False)
    held = []

    def note(*_: Any) -> None:
        held.append(sum(place.bytes_held for place in memopt.offload.stats().places))

    for block in model.blocks:
        block.register_forward_hook(note)
    memopt.offload.stats(wait=True, reset=True)
    with memopt.offload("disk", directory=tmp_path, keep_last=0):
        large = torch.ones(1 << 23, requires_grad=True).exp()
    loss = model(batch)
    away = sum(block.away for block in plan.blocks)
    assert away > 0
    found = memopt.offload.stats().places
    assert sum(place.bytes_away for place in found) == away + large.nbytes
    del large
    assert held == [0] * 8
    loss.backward()
    plan.undo()


def test_copies_that_leave_late_count_in_backward(tmp_path: Path) -> None:
    """Also in that of earlier blocks: here the first one's is the peak, and it offloads nothing."""
    model, batch = Chain([32, 1, 1, 1, 1]), tokens(16, 64)
    plan = memopt.plan(model, batch, 1 << 30, measure=False, offload=tmp_path)
    terms = plan.terms
    leave = terms.choices.index(Choice(offload=1.0))
    numbers = [0, terms.choices.index(KEEP), *[leave] * 4, 0]

    def peak(copies: int, in_step: bool = False) -> int:
        mine = replace(terms, copies_in_flight=copies, in_step=in_step)
        return _at_worst(plan.profile, mine, evaluated(plan.profile, mine, numbers))

    largest = _largest(plan.profile, terms, numbers)
    assert [peak(copies) - peak(1) for copies in (2, 3)] == [largest, 2 * largest]
    assert peak(1, in_step=True) == peak(3, in_step=True) == peak(1) - largest


class Centred(nn.Module):
    """Assigns a buffer anew in forward, as DINO's teacher does its centre."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in "ab")
        self.register_buffer("centre", torch.zeros(1000, 16))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.centre = 0.9 * self.centre + 0.1 * x.mean()
        for block in self.blocks:
            x = block(x)
        return (x - self.centre.mean(0)).square().mean()


class Momentum(nn.Module):
    """Gives the weights of a second model new memory in forward, as MoCo does its key encoder's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in "ab")
        self.keys = nn.Sequential(nn.Linear(16, 500), nn.Linear(500, 16)).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for weight in self.keys.parameters():
                weight.data = weight.data * 0.9
            target = self.keys(x)
        for block in self.blocks:
            x = block(x)
        return (x - target).square().mean()


@pytest.mark.parametrize("make", [Centred, Momentum])
def test_tensors_that_forward_gives_other_memory(make: type[nn.Module]) -> None:
    """What they had before is held to be put back; a step of the user's frees it."""
    model, x = make(), torch.randn(50, 16)
    with pytest.raises(memopt.BudgetTooSmall) as error:
        memopt.plan(model, x, 100, optimizer=None, measure=False, chunks=False)
    floor = error.value.floor
    plan = memopt.plan(model, x, floor, optimizer=None, measure=False, chunks=False)
    plan.apply()
    assert plan.measured_peak == plan.peak <= floor


def test_the_floor_without_chunks_is_said_to_be_no_lower() -> None:
    """Rounded up as the floor is: it was said to be "about 0.1 MB", with a floor of 0.2 MB."""
    model, batch = Chain([4] * 2, 16), tokens(4, 8)
    plan = memopt.plan(model, batch, 1 << 30, measure=False)
    with pytest.raises(BudgetTooSmall) as told:
        plan.within(100_000)
    floor = re.findall(r"at least ([\d.]+) MB, the floor", str(told.value))
    without = re.findall(r"without, the floor is about ([\d.]+) MB", str(told.value))
    assert all(float(each) >= float(floor[0]) for each in without)
    assert "without, the floor is about" in str(told.value)
