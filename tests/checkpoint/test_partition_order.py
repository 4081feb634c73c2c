"""Proves: the ranks of a partition start the same gathers in the same order, whatever becomes of
the regions: the next one before the recompute that hides it, partial, repeated and missing
backwards, graphs that are dropped, nested regions, threads, errors; and that the time of all but
the first gather is hidden as far as recomputes are long enough.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt._checkpoint import (
    checkpoint,
    checkpoint_wrapper,
    is_recomputing,
)
from memopt._extension import _C
from tests.checkpoint.partitions import (
    BYTES,
    ROWS,
    SIZE,
    assert_nothing_is_left,
    body,
    gradients,
    layer,
    part_bytes,
    starts,
    values,
    wrapped,
)
from tests.checkpoint.support import torch_reentrant
from tests.checkpoint.virtual_ranks import Rank, VirtualRanks
from tests.support.bits import assert_same_bits


class Timed(nn.Module):
    """Each run takes a second of the rank's clock."""

    def __init__(self, rank: Rank, seconds: float) -> None:
        super().__init__()
        self.layer, self.rank, self.seconds = layer(), rank, seconds

    def forward(self, x: Tensor) -> Tensor:
        self.rank.log.append("recompute" if is_recomputing() else "forward")
        self.rank.work(self.seconds)
        return self.layer(x)


@pytest.mark.parametrize("seconds", [2.0, 1.0, 0.25])
def test_gathers_run_beside_recomputes(seconds: float) -> None:
    """Of `layers` regions of `seconds` with gathers of one second, all but the first are hidden as
    far as a recompute is long enough.
    """
    layers = 5

    def run(rank: Rank) -> float:
        model = nn.Sequential(*(Timed(rank, seconds) for _ in range(layers)))
        for module in model:
            checkpoint_wrapper(module, partition=rank.partition)
        x = values(ROWS, SIZE).requires_grad_()
        model(x * 1).sum().backward()  # compares the inputs
        loss = model(x * 1).sum()
        begin = rank.clock
        loss.backward()
        return rank.clock - begin

    ranks = VirtualRanks(2, seconds_per_byte=1 / part_bytes(BYTES, 2))
    hidden = 1 + seconds + (layers - 1) * max(seconds, 1.0)
    assert ranks.run(run) == pytest.approx([hidden, hidden])


def backward_log(rank: Rank, count: int = 3) -> list[str]:
    model = nn.Sequential(*(Timed(rank, 1.0) for _ in range(count)))
    for module in model:
        checkpoint_wrapper(module, partition=rank.partition)
    x = values(ROWS, SIZE).requires_grad_()
    loss = model(x * 1).sum()
    rank.log.clear()
    loss.backward()
    return rank.log


def test_next_gather_starts_before_the_first_is_waited_for() -> None:
    expected = ["start 3", "start 4", "wait 3", "recompute"]
    expected += ["start 5", "wait 4", "recompute", "wait 5", "recompute"]
    assert VirtualRanks(2).run(backward_log) == [expected, expected]


def rows_of(*rows: int) -> list[int]:
    """The gathers of `regions`."""
    return [16 * count for count in rows]


def regions(rank: Rank, *rows: int) -> list[Tensor]:
    """The results of independent regions of so many rows each."""
    return [
        checkpoint(torch.exp, values(r, SIZE).requires_grad_() * 1, partition=rank.partition)
        for r in rows
    ]


def test_region_that_backward_skips_is_gathered_ahead_and_dropped() -> None:
    """A backward that goes through regions 1 and 3 of 3: the order of starts is the order of calls,
    whatever comes of them.
    """

    def run(rank: Rank) -> None:
        one, two, three = regions(rank, 2, 4, 6)
        (one.sum() + three.sum()).backward()
        two.sum().backward()

    ranks = VirtualRanks(2)
    ranks.run(run)
    assert starts(ranks) == rows_of(6, 4, 2, 4)
    assert_nothing_is_left(ranks)


def test_what_one_rank_dropped_is_nan_where_another_needs_it() -> None:
    """Against the rules: a rank that goes on with a region that the other has no graph of gets no
    gradients that look like some.
    """

    def run(rank: Rank) -> Tensor:
        first = values(2, SIZE).requires_grad_()
        one = checkpoint(torch.exp, first * 1, partition=rank.partition)
        (two,) = regions(rank, 2)
        if rank.number == 0:
            del one
            two.sum().backward()
            return first.detach()
        (one.sum() + two.sum()).backward()
        assert first.grad is not None
        return first.grad

    _, gradient = VirtualRanks(2).run(run)
    assert gradient.isnan().any()


def test_dropped_graph_is_gathered_with_nothing_in_it() -> None:
    """Whether a graph lives may differ between ranks, until Python's collector has run: here one
    rank keeps what the other drops.
    """

    def run(rank: Rank) -> Tensor:
        dropped, kept = regions(rank, 2, 4)
        held = [dropped] if rank.number == 1 else []
        del dropped
        x = kept.sum()
        x.backward()
        assert len(held) == rank.number
        return x.detach()

    ranks = VirtualRanks(2)
    ranks.run(run)
    assert starts(ranks) == rows_of(4, 2)
    assert_nothing_is_left(ranks)


def test_second_backward_gathers_again_and_looks_ahead_again() -> None:
    def run(rank: Rank) -> list[str]:
        model = nn.Sequential(*(Timed(rank, 1.0) for _ in range(2)))
        for module in model:
            checkpoint_wrapper(module, partition=rank.partition)
        loss = model(values(ROWS, SIZE).requires_grad_() * 1).sum()
        loss.backward(retain_graph=True)
        rank.log.clear()
        loss.backward()
        return rank.log

    expected = ["start 4", "start 5", "wait 4", "recompute", "wait 5", "recompute"]
    assert VirtualRanks(2).run(run) == [expected, expected]


def test_several_forwards_before_their_backwards() -> None:
    """As a pipeline does: the first one's backward comes first. A step's first region looks no
    further back, to a region whose backward has been.
    """

    def run(rank: Rank) -> None:
        a = regions(rank, 2)[0]
        b = checkpoint(torch.sin, regions(rank, 4)[0], partition=rank.partition)
        a.sum().backward()
        c = regions(rank, 6)[0]
        b.sum().backward()
        c.sum().backward()

    ranks = VirtualRanks(2)
    ranks.run(run)
    assert starts(ranks) == rows_of(2, 4, 4, 6)
    assert_nothing_is_left(ranks)


def test_looking_at_a_saved_tensor_gathers_alone() -> None:
    def run(rank: Rank) -> None:
        one, two = regions(rank, 2, 4)
        assert torch.equal(two.grad_fn._saved_result, two)  # type: ignore[union-attr]
        (one.sum() + two.sum()).backward()

    ranks = VirtualRanks(2)
    ranks.run(run)
    assert starts(ranks) == rows_of(4, 4, 2)


def test_nested_regions_split_the_outermost_inputs_only() -> None:
    def run(rank: Rank) -> list[Tensor]:
        model = wrapped(rank)
        checkpoint_wrapper(model, partition=rank.partition)
        return gradients(model, values(ROWS, SIZE))

    ranks = VirtualRanks(2)
    expected = gradients(body(), values(ROWS, SIZE))
    for actual in ranks.run(run):
        assert_same_bits(actual, expected)
    assert starts(ranks) == [part_bytes(BYTES, 2)]


def test_inside_torchs_checkpoint_inputs_stay_whole() -> None:
    def run(rank: Rank) -> list[Tensor]:
        model = wrapped(rank)

        def call(x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)  # type: ignore

        x = values(ROWS, SIZE).requires_grad_()
        call(x * 1).square().sum().backward()
        return [x.grad]  # type: ignore[list-item]

    ranks = VirtualRanks(2)
    expected = gradients(body(), values(ROWS, SIZE))[:1]
    for actual in ranks.run(run):
        assert_same_bits(actual, expected)
    assert starts(ranks) == []


def test_regions_that_are_called_in_backward() -> None:
    """By PyTorch's reentrant checkpoint, whose forward has no gradients and sends nothing."""

    def run(rank: Rank) -> list[Tensor]:
        model = wrapped(rank)
        x = values(ROWS, SIZE).requires_grad_()
        loss = torch_reentrant(model, x * 1).square().sum()
        assert rank.started == []
        loss.backward()
        return [t.grad for t in (x, *model.parameters()) if t.grad is not None]

    ranks = VirtualRanks(2)
    expected = gradients(body(), values(ROWS, SIZE))
    for actual in ranks.run(run):
        assert_same_bits(actual, expected)
    # The first one's input is a leaf there.
    assert starts(ranks) == 2 * [part_bytes(BYTES, 2)]
    assert_nothing_is_left(ranks)


def test_two_threads_with_a_group_each() -> None:
    """Their orders are their own."""
    groups = [VirtualRanks(2) for _ in range(2)]
    expected = gradients(body(), values(ROWS, SIZE))
    outer = VirtualRanks(2)  # a thread for each group
    results = outer.run(
        lambda rank: groups[rank.number].run(lambda r: gradients(wrapped(r), values(ROWS, SIZE)))
    )
    for of_group in results:
        for actual in of_group:
            assert_same_bits(actual, expected)
    assert_nothing_is_left(*groups)


def test_error_in_every_rank_leaves_nothing_and_the_next_step_is_right() -> None:
    """The gather that was ahead is dropped on all of them."""

    class Fails(nn.Module):
        fail = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fail and is_recomputing():
                raise RuntimeError("on purpose")
            return x.exp()

    def run(rank: Rank) -> list[Tensor]:
        failing = checkpoint_wrapper(Fails(), partition=rank.partition)
        model = nn.Sequential(wrapped(rank), failing)
        failing.fail = True
        with pytest.raises(RuntimeError, match="on purpose"):
            model(values(ROWS, SIZE).requires_grad_() * 1).sum().backward()
        failing.fail = False
        return gradients(model, values(ROWS, SIZE))

    expected = gradients(nn.Sequential(body(), Fails()), values(ROWS, SIZE))
    ranks = VirtualRanks(2)
    for actual in ranks.run(run):
        assert_same_bits(actual, expected)
    assert_nothing_is_left(ranks)


def test_failed_gather_is_an_error_of_backward() -> None:
    """One rank stops before its backward, the other's gather never ends."""
    link = VirtualRanks(2)

    def run(rank: Rank) -> None:
        (y,) = regions(rank, 2)
        if rank.number == 0:
            with pytest.raises(ConnectionError, match="gone"):
                y.sum().backward()

    def collect(number: int) -> Any:
        if number == 0:
            return VirtualRanks.collect(link, number)
        raise ConnectionError("gone")

    link.collect = collect  # type: ignore[method-assign]
    link.run(run)
    gc.collect()
    assert _C.live_regions() <= link.regions_before
