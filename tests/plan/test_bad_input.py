"""Proves: what cannot be planned is refused by name, with the rule and what was got, and the model
is as it was.
"""

from __future__ import annotations

import copy
import ctypes
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.memory.predicted.outcome import DependsOnValues
from memopt.memory.sizes import as_bytes
from tests.plan.models import Chain, chain, tokens
from tests.plan.support import looks

EVERYTHING = 1 << 30


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (1000, 1000),
        ("1000", 1000),
        ("1.5e9", 1_500_000_000),
        ("40GiB", 40 << 30),
        ("40 gib", 40 << 30),
        ("24GB", 24_000_000_000),
        ("0.5 TiB", 1 << 39),
        ("512M", 512_000_000),
        ("7KiB", 7 << 10),
        ("12B", 12),
    ],
)
def test_sizes(size: Any, nbytes: int) -> None:
    assert as_bytes("size", size) == nbytes


@pytest.mark.parametrize(
    "size", ["forty", "40 apples", "", "4iB", "-3GB", "nan", "inf", 0, -1, "1e99"]
)
def test_no_sizes(size: Any) -> None:
    with pytest.raises(ValueError, match="budget must be"):
        as_bytes("budget", size)


@pytest.mark.parametrize("size", [None, True, [1], b"1"])
def test_other_things_are_no_sizes(size: Any) -> None:
    with pytest.raises(TypeError, match="budget must be"):
        as_bytes("budget", size)


def test_a_budget_below_the_floor() -> None:
    """Says the floor, what is alive then, and what would lower it; a plan with the floor exists."""
    model, batch = chain()
    before = looks(model)
    with pytest.raises(memopt.BudgetTooSmall, match="the floor, got") as info:
        memopt.plan(model, batch, "100KB", measure=False)
    text = str(info.value)
    first, *items = text.splitlines()
    assert re.fullmatch(
        r"^plan: budget must be at least [\d.,]+ MB, the floor, got 100KB \(0.1 MB\)", first
    )
    assert all(len(line) < 130 and line.startswith("  ") for line in items)
    for words in ("of weights", "the largest piece is", "would lower it by"):
        assert sum(words in line for line in items) >= 1, text
    assert "iB" not in text
    said = re.search(r"at least ([\d.,]+ MB)", first)
    assert said is not None
    assert memopt.plan(model, batch, said[1].replace(",", ""), measure=False).peak
    assert looks(model) == before
    assert memopt.plan(model, batch, info.value.floor, measure=False).peak == info.value.floor


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"budget": "many"}, ValueError, "budget must be bytes or a string such as '40GiB', got"),
        ({"blocks": ["blocks.0", "blocks.77"]}, ValueError, "got 'blocks.77'"),
        ({"blocks": ["blocks.0", "blocks.0.up"]}, ValueError, "'blocks.0.up' inside 'blocks.0'"),
        ({"blocks": nn.Conv2d}, ValueError, "blocks must choose submodules of the model, got none"),
        ({"blocks": 3}, TypeError, "blocks must be"),
        ({"device": "tpu"}, ValueError, 'device must be "cpu", "cuda" or None'),
        ({"measure": "maybe"}, ValueError, "measure must be"),
        (
            {"chunks": 4},
            TypeError,
            "chunks must be True or False, since a plan chooses how many, got",
        ),
        ({"steps": 0}, ValueError, "steps must be an int of at least 1, got 0"),
        ({"micro_batches": 99}, ValueError, "micro_batches must be from 1 to the batch's 4 rows"),
        ({"optimizer": 3}, TypeError, "optimizer must be"),
        ({"offload": "moon"}, ValueError, "offload: must be 'cpu', 'disk' or a path"),
        (
            {"offload": "cpu"},
            ValueError,
            "of a step on the CPU, must be 'disk' or a path, got 'cpu'",
        ),
        ({"host_budget": "x"}, ValueError, "host_budget must be"),
        ({"device": "cuda", "measure": True}, ValueError, "measure=True must have a model"),
    ],
)
def test_arguments(options: dict[str, Any], error: type[Exception], match: str) -> None:
    model, batch = chain()
    before = looks(model)
    with pytest.raises(error, match=match):
        memopt.plan(model, batch, **{"budget": EVERYTHING, "measure": False, **options})
    assert looks(model) == before


def test_models_that_cannot_be_planned() -> None:
    batch = tokens()
    with pytest.raises(TypeError, match=r"model must be an nn.Module, got int"):
        memopt.plan(3, batch, EVERYTHING)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must have modules that it calls"):
        memopt.plan(nn.Linear(3, 3), torch.randn(2, 3), EVERYTHING, loss=torch.sum)
    model, _ = chain()
    memopt.convert(model)
    with pytest.raises(ValueError, match=r"memopt.revert"):
        memopt.plan(model, batch, EVERYTHING)
    model, _ = chain()
    memopt.apply_activation_checkpointing(model)
    with pytest.raises(ValueError, match=r"memopt.unwrap"):
        memopt.plan(model, batch, EVERYTHING)
    with pytest.raises(TypeError, match=r"compiled=True"):
        memopt.plan(torch.compile(Chain([2])), batch, EVERYTHING)  # type: ignore[arg-type]
    in_place = Chain([2])
    in_place.blocks[0].compile(backend="eager")
    with pytest.raises(TypeError, match=r"must not be compiled, got Block at 'blocks.0'"):
        memopt.plan(in_place, batch, EVERYTHING)


class Looks(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y.mean() if y.max().item() < 9 else y.sum()


def test_other_rows_of_a_step_that_looks_at_values() -> None:
    """A batch of other rows has none, and the model's device is not at fault."""
    model = Looks(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in "ab"))
    plan = memopt.plan(model, torch.ones(2, 8), "1GiB", measure=False)
    with pytest.raises(DependsOnValues, match="the step asks for one"):
        plan.largest_batch()


def test_a_sample_that_does_not_fit_the_model() -> None:
    """The model's own error; and so too for one without a loss."""
    model, _ = chain()
    before = looks(model)
    with pytest.raises((RuntimeError, IndexError, TypeError)):
        memopt.plan(model, torch.randn(4, 3), EVERYTHING)
    with pytest.raises(ValueError, match="loss must be one number"):
        memopt.plan(model, tokens(), EVERYTHING, loss=lambda output: output.detach())
    with pytest.raises(ValueError, match="batch must hold a tensor"):
        memopt.plan(model, {"ids": 3}, EVERYTHING)
    assert looks(model) == before


class Stumbles(nn.Module):
    """Raises in the middle of its n-th forward."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.inner, _ = chain()
        # A number of Python's would be put back after each step. Nor is this probed, as it holds a
        # list.
        self.calls, self.at, self.notes = ctypes.c_int(0), at, [""]

    def forward(self, ids: Tensor) -> Tensor:
        self.calls.value += 1
        if self.calls.value == self.at:
            self.inner.blocks[0](self.inner.embed(ids))
            raise OSError("the disk is full")
        return self.inner(ids)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_step_that_raises(at: int) -> None:
    """While it is predicted or timed: the error is the model's, and nothing is left on it."""
    model, batch = Stumbles(at), tokens()
    before = looks(model)
    with pytest.raises(OSError, match="the disk is full"):
        memopt.plan(model, batch, EVERYTHING, steps=1).apply()
    assert looks(model) == before
    assert all(p.grad is None for p in model.parameters())


def test_a_watched_step_that_raises() -> None:
    model, batch = Stumbles(0), tokens()
    plan = memopt.plan(model, batch, EVERYTHING, measure=False)
    before = looks(model)
    model.at = model.calls.value + 1
    with pytest.raises(OSError, match="the disk is full"):
        plan.apply()
    assert looks(model) == before
    assert plan.apply().measured_peak == plan.peak


def test_plans_at_the_wrong_time(tmp_path: Path) -> None:
    model, batch = chain()
    plan = memopt.plan(model, batch, EVERYTHING, measure=False)
    with pytest.raises(ValueError, match="must be on a model"):
        plan.undo()
    plan.apply(watch=False)
    with pytest.raises(ValueError, match="must not be on a model already"):
        plan.apply()
    for call in (plan.largest_batch, lambda: plan.within(EVERYTHING)):
        with pytest.raises(ValueError, match="must not be on its model"):
            call()
    plan.undo()
    plan.save(tmp_path / "plan.json")
    loaded = memopt.Plan.load(tmp_path / "plan.json")
    with pytest.raises(TypeError, match="must be given a model"):
        loaded.apply()
    with pytest.raises(TypeError, match="must have a model, got a loaded one"):
        loaded.within(EVERYTHING)
    for other in (Chain([4] * 5), Chain([4] * 5 + [3]), nn.Linear(2, 2)):
        before = looks(other)
        with pytest.raises(ValueError, match="model must have the plan's blocks"):
            loaded.apply(other)
        assert looks(other) == before
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="must hold a plan"):
        memopt.Plan.load(tmp_path / "other.json")
    with pytest.raises(ValueError, match="count must be an int of at least 2"):
        plan.pareto(count=1)
    with pytest.raises(
        TypeError, match=r"^Plan.pareto: count must be an int of at least 2, got 2.5"
    ):
        plan.pareto(count=2.5)  # type: ignore[arg-type]
    for size in (plan.largest_batch, plan.longest_sequence):
        with pytest.raises(ValueError, match=f"^Plan.{size.__name__}: limit must be .*, got 0"):
            size(limit=0)


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    return memopt.plan(*chain(), EVERYTHING, measure=False).to_dict()


def changed(saved: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value at a path of keys and numbers; `...`: without it."""
    found: Any = copy.deepcopy(saved)
    keys = [int(key) if key.isdigit() else key for key in path.split()]
    inner = found
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    if value is ...:
        del inner[keys[-1]]
    return found


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("format", "memopt plan 1", "of this memopt's format, .*, got 'memopt plan 1', of memopt"),
        ("format", "another", "that was saved, got something else"),
        ("blocks", ..., "as it was saved, got no blocks"),
        ("heads", None, "got None for heads"),
        ("peak", "much", "got 'much' for peak"),
        ("in_step", 1, "got 1 for in_step"),
        ("signature", [1], r"got \[1\] for signature"),
        ("signature", {}, "got the block 'blocks.0', which its signature lacks"),
        ("blocks 0 choice recipes", ..., r"got no blocks\[0\].choice.recipes"),
        ("blocks 0 choice more", 1, r"got an unknown blocks\[0\].choice.more"),
        ("blocks 0 choice segments", [2], r"got \[2\] for blocks\[0\].choice.segments"),
        ("budget", -5, "got -5 for budget"),
        (
            "blocks 0 choice offload",
            5.0,
            r"got blocks\[0\].choice, whose offload must be from 0 to 1, got 5.0",
        ),
        ("blocks 0 choice chunks", 0, r"whose chunks must be at least 1, got 0"),
        ("profile gradients 0", 0.5, r"got 0.5 for profile.gradients\[0\]"),
    ],
)
def test_a_damaged_file(
    saved: dict[str, Any], path: str, value: Any, said: str, tmp_path: Path
) -> None:
    """A part of another kind was Python's error, or was taken."""
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(changed(saved, path, value)))
    with pytest.raises(ValueError, match=rf"^Plan.load: {re.escape(str(file))} must hold .*{said}"):
        memopt.Plan.load(file)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_json(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(ValueError, match="must hold a plan that was saved, got something else"):
        memopt.Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("widths", [[4] * 7, [4] * 12])
def test_a_deeper_model(widths: list[int], saved: dict[str, Any], tmp_path: Path) -> None:
    """Its other blocks would have no fate, and its step is above the budget."""
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(saved))
    model = Chain(widths)
    before = looks(model)
    with pytest.raises(ValueError, match=r"at 'blocks\.6' in place of nothing"):
        memopt.Plan.load(file).apply(model)
    assert looks(model) == before


def test_a_part_that_the_model_lacks(saved: dict[str, Any], tmp_path: Path) -> None:
    """The signature tells parameters, and a part may have none."""
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(changed(saved, "blocks 0 choice parts", ["gate"])))
    model, _ = chain()
    before = looks(model)
    with pytest.raises(ValueError, match=r"^Plan.apply: paths must be .* got 'blocks.0.gate'"):
        memopt.Plan.load(file).apply(model)
    assert looks(model) == before


def test_a_measured_peak_is_of_the_model_that_it_was_measured_of(
    saved: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(changed(saved, "measured_peak", 1000)))
    plan = memopt.Plan.load(file)
    assert plan.measured_peak == 1000
    plan.apply(chain()[0])
    assert plan.measured_peak is None


class Releases(nn.Module):
    """Releases on its first call more than its optimizer ever takes, as 8-bit weights do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.once: Tensor | None = torch.zeros(1 << 16)

    def forward(self, x: Tensor) -> Tensor:
        self.once = None
        return self.layers(x).sum()


def test_a_first_step_that_releases_memory() -> None:
    memopt.plan(Releases(), torch.zeros(2, 4), EVERYTHING, measure=False)
