"""Proves: the head with its loss, and parts of blocks that work on each row alone, run in chunks of
rows where a plan needs that. So floors fall, and their error says by how much; what is predicted is
the allocator's peak. Undoing takes both off. Models without values have the same plans.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import memopt
from memopt._convert.head import is_head
from memopt._head.call import watched_heads
from memopt._plan.plan import Plan
from memopt.applied import assigned
from tests.plan.models import Block
from tests.plan.support import allocated_above, floor_of, gradients, looks, without_regions

WIDTH, WORDS, ROWS = 16, 500, 256


class Attends(nn.Module):
    """Mixes rows; its last weight may be zero at the beginning of training."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attends(), Block(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(x + self.attention(x))
        return out


class Language(nn.Module):
    def __init__(self, words: int = WORDS, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def ids(rows: int = 2, length: int = ROWS // 2, words: int = WORDS) -> Tensor:
    return torch.arange(rows * length).view(rows, length) * 7 % words


def language(words: int = WORDS) -> Language:
    torch.manual_seed(0)
    return Language(words)


def planned(words: int, chunks: bool = True) -> Plan:
    batch = ids(words=words)
    return memopt.plan(
        language(words), batch, 1 << 30, measure=False, optimizer=None, chunks=chunks
    )


@pytest.fixture(scope="module")
def plans() -> dict[tuple[str, bool], Plan]:
    """With few words, where MLPs are the most, and with many; with chunks and without."""
    return {
        (name, chunks): planned(words, chunks)
        for name, words in (("few", 20), ("many", WORDS))
        for chunks in (True, False)
    }


Plans = dict[tuple[str, bool], Plan]


def test_what_can_run_in_chunks(plans: Plans) -> None:
    """The MLP and not the attention, and the head; nothing with chunks=False."""
    for name in ("few", "many"):
        profile = plans[name, True].profile
        assert {parts.rows for parts in profile.parts.values()} == {("mlp",)}
        without = plans[name, False]
        assert not any(parts.rows for parts in without.profile.parts.values())
        assert not without.profile.heads
        least = without.within(floor_of(without).floor)
        assert all(choice.chunks is None for choice in least.assignment.choices.values())
    assert plans["many", True].profile.heads == ("head",)


@pytest.mark.parametrize("name", ["few", "many"])
def test_floors_fall(plans: Plans, name: str) -> None:
    """Below that of all other plans; the error says what it has and what is gained by it."""
    plan, error = plans[name, True], floor_of(plans[name, True])
    without = floor_of(plans[name, False])
    assert error.floor < 0.9 * without.floor
    said = "the head in chunks (head)" if name == "many" else "MLPs in chunks (in"
    assert f"it has {said}" in str(error)
    assert "in chunks" not in str(without).partition("beyond plans")[0]
    least = plan.within(error.floor)
    assert least.peak <= error.floor
    if name == "many":
        assert least.assignment.heads == ("head",)
        assert "In chunks of rows with the loss: head" in str(least)
    else:
        assert any(choice.chunks for choice in least.assignment.choices.values())


@pytest.mark.parametrize("name", ["few", "many"])
def test_apply_measures_what_was_predicted_and_undo_takes_it_off(
    plans: Plans, name: str, tmp_path: Path
) -> None:
    plan = plans[name, True].within(floor_of(plans[name, True]).floor)
    assert plan.live is not None
    model, batch = plan.live.step.model, plan.live.step.batch
    before = looks(model)
    with assigned(model, without_regions(plan)):
        expected = gradients(model, batch)
    assert looks(model) == before
    plan.apply()
    assert plan.measured_peak == plan.peak
    assert allocated_above(model, batch) + plan.profile.base == plan.peak
    has_head = bool(plan.assignment.heads)
    assert is_head(model.head) == has_head
    with watched_heads() as uses:
        found = gradients(model, batch)
    assert [(use.losses, use.were_made) for use in uses] == [(1, False)] * has_head
    plan.undo()
    assert looks(model) == before
    assert all(torch.equal(found[key], expected[key]) for key in expected)

    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.assignment.choices == plan.assignment.choices
    assert str(loaded) == str(plan)
    other = language(20 if name == "few" else WORDS)
    loaded.apply(other)
    again = gradients(other, batch)
    assert all(torch.equal(again[key], expected[key]) for key in expected)


def test_a_model_without_values_has_the_same_plan(plans: Plans) -> None:
    with torch.device("meta"):
        model, batch = Language(), torch.empty(2, ROWS // 2, dtype=torch.long)
    plan = memopt.plan(model, batch, 1 << 30, optimizer=None, device="cpu")
    mine, other = plan.profile, plans["many", True].profile
    assert mine.parts == other.parts
    assert mine.heads == other.heads
    assert floor_of(plan).floor == floor_of(plans["many", True]).floor


class Gated(nn.Module):
    """What one row gives the others is zero in the beginning, as with adaLN-zero."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.up = Attends(), nn.Linear(WIDTH, 8 * WIDTH)
        self.down, self.gate = nn.Linear(8 * WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).relu()) + self.gate * self.attention(x)
        return out


def test_a_module_that_mixes_rows_is_refused_when_it_has_values() -> None:
    """Also one whose first values hide it: without values random numbers show it."""
    with torch.device("meta"):
        model = nn.Sequential(*(Gated() for _ in range(3)))
        batch = torch.empty(2, 64, WIDTH)
    plan = memopt.plan(
        model, batch, 1 << 30, optimizer=None, device="cpu", loss=Tensor.sum, blocks=Gated
    )
    assert not any(parts.rows for parts in plan.profile.parts.values())


def test_the_longest_sequence_has_a_plan(plans: Plans) -> None:
    """And is longer than without chunks."""
    plan, without = plans["many", True], plans["many", False]
    budget = floor_of(without).floor
    longest = plan.longest_sequence(budget)
    assert longest > 1.2 * ids().shape[1]
    model, batch = language(), ids(2, longest)
    found = memopt.plan(model, batch, budget, measure=False, optimizer=None)
    assert found.peak <= budget
    assert plan.longest_sequence(budget, limit=2) == 2


class Kind(Tensor):
    """A class of tensors whose operators return its own."""


class Floats(nn.Module):
    """Takes rows of numbers, which may be of any class."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def of_another_class(model: nn.Module, x: Tensor) -> Tensor:
    return x.as_subclass(Kind)


def pruned(model: nn.Module, x: Tensor) -> Tensor:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            prune.l1_unstructured(module, "weight", amount=0.3)  # a hook that sets it in each call
    return x


@pytest.mark.parametrize("change", [of_another_class, pruned])
def test_calls_that_cannot_run_in_planned_chunks_run_whole(
    change: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    """They raised in training, for chunks that nobody had asked for. A warning says why, once; and
    what was refused is not probed again.
    """
    torch.manual_seed(0)
    model, x = Floats(), torch.randn(2, 64, WIDTH)
    plain = copy.deepcopy(model)
    expected = gradients(plain, change(plain, x))
    rich = memopt.plan(model, x, 1 << 30, measure=False, optimizer=None)
    least = rich.within(floor_of(rich).floor)
    assert any(choice.chunks for choice in least.assignment.choices.values())
    least.apply()
    x = change(model, x)
    with pytest.warns(
        UserWarning, match=r"^Plan.apply: Block, planned in chunks of rows, runs whole"
    ):
        got = gradients(model, x)
    with mock.patch("memopt._checkpoint.rows.RowProbe", side_effect=AssertionError):
        gradients(model, x)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient)
