"""Proves: of a long chain of modules several in a row share a region where that lowers the peak, by
the division that is the best of all; each still runs twice, what is said to stay is what stays, the
peak is predicted in every byte, and gradients have the bits of the plain step.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import memopt
from memopt._checkpoint.assigned import put_regions, region_choices
from memopt._checkpoint.measured import MeasuredRegions, measured_regions
from memopt._checkpoint.neighbours import Chain, _divided
from memopt._checkpoint.wrapper import settings_of
from memopt.assignment import Assignment
from memopt.memory.allocator import LiveBytes
from memopt.memory.calls.measure import step_with, sum_of_outputs
from memopt.memory.peak import bytes_here
from memopt.memory.predicted.predict import hollow_step
from memopt.memory.step import Step
from memopt.memory.totals import highs_of
from tests.checkpoint.support import step_results
from tests.support.bits import assert_same_bits

WIDTH, ROWS = 8, 256
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    calls = 0

    def __init__(self, factor: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, factor * WIDTH), nn.Linear(factor * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        Block.calls += 1
        out: Tensor = x + self.down(self.drop(torch.relu(self.up(x))))
        return out


class Net(nn.Module):
    """Blocks one after another. `beside`: their results are read once more in the end."""

    def __init__(self, blocks: Sequence[nn.Module], beside: bool = False) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks, self.beside = nn.ModuleList(blocks), beside

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.stem(x), 0
        for block in self.blocks:
            x = block(x)
            total = total + x.sin() if self.beside else 0
        out: Tensor = self.head(x + total)
        return out


def net(length: int = 12, **options: Any) -> Net:
    torch.manual_seed(0)
    return Net([Block() for _ in range(length)], **options)


def step_of(model: nn.Module) -> Step:
    return Step(model, X, None, sum_of_outputs, who="test")


def put(model: nn.Module, found: MeasuredRegions, segments: bool = True) -> None:
    put_regions(model, Assignment(region_choices(found.paths, found.segments if segments else ())))


def predicted_peak(model: nn.Module, found: MeasuredRegions, segments: bool = True) -> int:
    step = step_of(model)
    return max(highs_of(hollow_step(step, lambda m: put(m, found, segments), "cpu").ledger))


def measured_peak(model: nn.Module) -> int:
    step = step_of(model)

    def run() -> None:
        step.forward_and_backward(X)
        model.zero_grad()

    run()
    gc.collect()
    with LiveBytes() as live:
        run()
    return bytes_here(step) + live.most_with_scratch


def test_a_long_chain_runs_in_segments() -> None:
    """36 blocks that keep as much as two of what they pass on: nine segments of four."""
    model = net(36)
    plain = step_results(lambda: model(X), [*model.parameters()])
    found = measured_regions(step_with("test", model, X))
    assert [len(segment) for segment in found.segments] == [4] * 9
    assert memopt.apply_activation_checkpointing(model, batch=X) == list(found.paths)
    assert memopt.saved_bytes(model, X) - X.nbytes == found.cut.stays
    Block.calls = 0
    assert_same_bits(step_results(lambda: model(X), [*model.parameters()]), plain)
    assert Block.calls == 2 * 36
    alone = net(36)
    memopt.apply_activation_checkpointing(alone, check_fn=Block)
    there = bytes_here(step_of(model))
    assert measured_peak(model) - there < 0.5 * (measured_peak(alone) - there)


@given(
    st.lists(st.sampled_from([1, 1, 1, 2, 4]), min_size=2, max_size=24),
    st.sampled_from([0.0, 0.5]),
    st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_the_predicted_peak_is_the_measured_one_and_no_higher_than_alone(
    factors: list[int], dropout: float, beside: bool
) -> None:
    torch.manual_seed(0)
    model = Net([Block(factor, dropout) for factor in factors], beside=beside)
    parameters = [*model.parameters()]

    def results() -> list[Tensor]:
        torch.manual_seed(1)
        return step_results(lambda: model(X), parameters)

    plain = results()
    found = measured_regions(step_with("test", model, X))
    expected = predicted_peak(model, found)
    assert expected <= predicted_peak(model, found, segments=False)
    put(model, found)
    assert memopt.saved_bytes(model, X) - X.nbytes == found.cut.stays
    assert measured_peak(model) == expected
    assert_same_bits(results(), plain)


NUMBERS = st.integers(0, 100)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=8), st.integers(0, 500))
@settings(max_examples=200, deadline=None)
def test_a_division_is_the_best_of_all_within_a_bound(
    numbers: list[tuple[int, int, int]], bound: int
) -> None:
    passed, kept, spare = zip(*numbers, strict=True)
    chain = Chain(tuple(map(str, range(len(numbers)))), passed[1:], kept, spare)

    def between(division: Sequence[tuple[int, int]]) -> int:
        return sum(chain.passed[last] for _, last in division[:-1])

    def fits(division: Sequence[tuple[int, int]]) -> bool:
        """A region alone takes what it takes."""
        return all(a == b or chain.working(a, b) <= bound for a, b in division)

    found = _divided(chain, bound)
    assert [n for a, b in found for n in range(a, b + 1)] == list(range(len(numbers)))
    assert fits(found)
    every = [
        [(a, b - 1) for a, b in itertools.pairwise((0, *cuts, len(numbers)))]
        for size in range(len(numbers))
        for cuts in itertools.combinations(range(1, len(numbers)), size)
    ]
    assert between(found) == min(map(between, filter(fits, every)))


def are_joined(model: nn.Module) -> bool:
    found = (settings_of(module) for module in model.modules())
    return any(one is not None and one.joined is not None for one in found)


@pytest.mark.parametrize(
    "options",
    [
        {"every": 2},
        {"skip_last": 1},
        {"chunks": 2},
        {"maintain_forward_counter": True},
        {"keep_decisions": True},
    ],
)
def test_where_each_has_options_of_its_own_it_is_a_region_of_its_own(
    options: dict[str, Any],
) -> None:
    model = net()
    assert memopt.apply_activation_checkpointing(model, batch=X, **options)
    assert not are_joined(model)


def test_what_is_read_elsewhere_is_kept_and_not_passed_on() -> None:
    assert measured_regions(step_with("test", net(beside=True), X)).segments == ()


class Choosing(Block):
    """Chooses rows by their values."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.sum(1).topk(ROWS // 2).indices
        return super().forward(x).index_add(0, rows, x[rows])


def test_modules_that_choose_by_values_stay_alone() -> None:
    torch.manual_seed(0)
    model = Net([Choosing() if n in (4, 9) else Block() for n in range(16)])
    found = measured_regions(step_with("test", model, X))
    assert found.segments
    inside = {path for segment in found.segments for path in segment}
    assert found.deciding == {"blocks.4", "blocks.9"}
    assert inside.isdisjoint(found.deciding)


def test_convert_says_so_and_revert_undoes_it() -> None:
    model = net()
    plain = memopt.saved_bytes(model, X)
    report = memopt.convert(model, X, checkpoint=True)
    assert len(report.checkpointed) == 12
    assert are_joined(model)
    told = [note for note in report.notes if note.startswith("one region of 2 modules")]
    assert len(told) == 6
    assert told[0].endswith("called in turn: blocks.0, blocks.1")
    memopt.revert(model)
    assert not are_joined(model)
    assert memopt.saved_bytes(model, X) == plain


def test_check_says_which_share_a_region() -> None:
    model = net()
    memopt.apply_activation_checkpointing(model, batch=X)
    blocks = memopt.check(model, X).blocks
    assert {block.asked for block in blocks} == {"region of 2 in a row"}
    assert {block.happened for block in blocks} == {"recomputed"}


def test_unwrap_undoes_it() -> None:
    model = net()
    memopt.apply_activation_checkpointing(model, batch=X)
    assert are_joined(model)
    memopt.unwrap(model)
    assert not are_joined(model)
