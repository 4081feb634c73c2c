"""Proves: with partition= each rank keeps its part of a region's inputs and has the gradients of
the whole ones to the last bit, whatever the tensors' dtypes and layouts; what is gathered, how many
bytes, and in which order; that the next gather runs beside a recompute; and that neither partial,
repeated nor missing backwards, nor graphs that are dropped, let one rank start a gather that
another does not. The ranks are threads here (virtual_ranks.py); tests/distributed has processes.
"""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import set_checkpoint_debug_enabled

import memopt
from memopt._extension import _C
from memopt.checkpoint import (
    checkpoint,
    checkpoint_wrapper,
    disable_checkpointing,
    is_recomputing,
)
from tests.checkpoint.support import assert_same_bits, plain
from tests.checkpoint.virtual_ranks import Rank, VirtualRanks

ROWS, SIZE = 16, 8
BYTES = ROWS * SIZE * 4
MESSAGE = 64 * 8
"""What a rank tells the others of a module's first call."""


def part_bytes(nbytes: int, ranks: int) -> int:
    """1/ranks of them, rounded up to 16."""
    return -(-nbytes // (16 * ranks)) * 16


def layer(seed: int = 0) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    made = nn.Sequential(nn.Linear(SIZE, 2 * SIZE), nn.Tanh(), nn.Linear(2 * SIZE, SIZE))
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def values(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def body(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(layer(seed) for seed in range(count)))


def wrapped(rank: Rank, count: int = 3, **options: Any) -> nn.Sequential:
    made = body(count)
    for module in made:
        checkpoint_wrapper(module, partition=rank.partition, **options)
    return made


def gradients(model: nn.Module, x: Tensor, backwards: int = 1) -> list[Tensor]:
    x = x.requires_grad_()
    loss = model(x * 1).square().sum()
    for number in range(backwards):
        loss.backward(retain_graph=number + 1 < backwards)
    found = [x.grad, *(p.grad for p in model.parameters())]
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


def assert_nothing_is_left(*ranks: VirtualRanks) -> None:
    gc.collect()
    assert _C.live_regions() == 0
    for all_of in ranks:
        for rank in all_of.ranks:
            assert rank.partition.native.unfinished() == 0


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("backwards", [1, 2])
def test_gradients_are_those_of_whole_inputs(count: int, backwards: int) -> None:
    expected = gradients(body(), values(ROWS, SIZE), backwards)
    ranks = VirtualRanks(count)
    for actual in ranks.run(lambda r: gradients(wrapped(r), values(ROWS, SIZE), backwards)):
        assert_same_bits(actual, expected)
    for rank in ranks.ranks:
        # One message of each module's first call, one gather of each region's every backward.
        assert rank.started == 3 * [MESSAGE] + backwards * 3 * [part_bytes(BYTES, count)]
    assert_nothing_is_left(ranks)


def storages_alive(storages: list[StorageWeakRef]) -> int:
    return sum(not storage.expired() for storage in storages)


def test_inputs_are_freed_after_forward() -> None:
    def run(rank: Rank) -> int:
        model = wrapped(rank)
        storages: list[StorageWeakRef] = []

        def remember(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            storages.append(StorageWeakRef(args[0].untyped_storage()))

        for module in model:
            module.register_forward_pre_hook(remember)
        loss = model(values(ROWS, SIZE).requires_grad_() * 1).square().sum()
        alive = storages_alive(storages)
        loss.backward()
        return alive

    assert VirtualRanks(2).run(run) == [0, 0]


# One region with one tensor of each kind: whether it is split.
def contiguous() -> Tensor:
    return values(ROWS, SIZE) * 1


def transposed() -> Tensor:
    return (values(SIZE, ROWS) * 1).t()


def channels_last() -> Tensor:
    return (values(2, 8, 4, 1) * 1).to(memory_format=torch.channels_last).view_as(values(2, 8, 4, 1))


def middle_of_a_storage() -> Tensor:
    return (values(3 * ROWS, SIZE) * 1)[ROWS : 2 * ROWS]


def half() -> Tensor:
    return values(ROWS, SIZE).to(torch.bfloat16)


def odd_bytes() -> Tensor:
    return values(131) > 0


def integers() -> Tensor:
    return torch.arange(100)


def expanded() -> Tensor:
    return values(1, SIZE).expand(ROWS, SIZE)


def with_holes() -> Tensor:
    return (values(ROWS, 2 * SIZE) * 1)[:, ::2]


def small() -> Tensor:
    return values(7)


def leaf() -> Tensor:
    return values(ROWS, SIZE).requires_grad_()


def view_of_a_leaf() -> Tensor:
    return leaf()[: ROWS // 2]


def parameter() -> Tensor:
    return nn.Parameter(values(ROWS, SIZE))


def conjugate() -> Tensor:
    return values(ROWS, SIZE).to(torch.complex64).conj()


def empty() -> Tensor:
    return values(0, SIZE) * 1


SPLIT = [contiguous, transposed, channels_last, middle_of_a_storage, half, odd_bytes, integers]
WHOLE = [expanded, with_holes, small, leaf, view_of_a_leaf, parameter, conjugate, empty]


def geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, tensor.is_conj()


def recomputed_arguments(rank: Rank, tensors: list[Tensor]) -> list[Tensor]:
    """What a region's recompute gets for `tensors`, which this frees."""
    got: list[list[Tensor]] = []

    def function(x: Tensor, rest: list[Tensor]) -> Tensor:
        got.append(rest)
        return x.exp()

    x = torch.ones(1, requires_grad=True)
    y = checkpoint(function, x, tensors, partition=rank.partition)
    got.clear()
    y.backward()
    return got[0]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("make", [*SPLIT, *WHOLE])
def test_tensor_comes_back_as_it_was(make: Callable[[], Tensor], count: int) -> None:
    expected = make()
    ranks = VirtualRanks(count)
    for (actual,) in ranks.run(lambda rank: recomputed_arguments(rank, [make()])):
        assert geometry(actual) == geometry(expected)
        assert torch.equal(actual, expected)
    expected_parts = [part_bytes(expected.nbytes, count)] if make in SPLIT else []
    assert ranks.ranks[0].started == [MESSAGE, *expected_parts]


@pytest.mark.parametrize("count", [2, 3])
def test_tensors_of_all_kinds_are_one_gather(count: int) -> None:
    makers = [*SPLIT, *WHOLE]
    ranks = VirtualRanks(count)
    for actual in ranks.run(lambda r: recomputed_arguments(r, [make() for make in makers])):
        for tensor, make in zip(actual, makers, strict=True):
            assert geometry(tensor) == geometry(make())
            assert torch.equal(tensor, make())
    parts = sum(part_bytes(make().nbytes, count) for make in SPLIT)
    assert ranks.ranks[-1].started == [MESSAGE, parts]


def test_the_same_tensor_twice_is_split_once() -> None:
    def run(rank: Rank) -> bool:
        x = contiguous()
        actual = recomputed_arguments(rank, [x, x])
        return actual[0] is actual[1]

    ranks = VirtualRanks(2)
    assert ranks.run(run) == [True, True]
    assert ranks.ranks[0].started == [MESSAGE, part_bytes(BYTES, 2)]


def test_single_tensor_is_the_gathered_memory() -> None:
    """No copy is made of it: what it lies in has the size of the gather."""

    def run(rank: Rank) -> list[int]:
        return [t.untyped_storage().nbytes() for t in recomputed_arguments(rank, [odd_bytes()])]

    assert VirtualRanks(2).run(run) == 2 * [[2 * part_bytes(131, 2)]]


def test_write_in_place_is_noticed() -> None:
    def run(rank: Rank) -> None:
        x = values(ROWS, SIZE).requires_grad_() * 1
        loss = checkpoint(layer(), x, partition=rank.partition).sum()
        x.add_(1)
        with pytest.raises(RuntimeError, match="must not be written in place before backward"):
            loss.backward()

    VirtualRanks(2).run(run)


def test_without_gradients_nothing_is_sent() -> None:
    def run(rank: Rank) -> None:
        model = wrapped(rank)
        with torch.no_grad():
            model(values(ROWS, SIZE))
        with disable_checkpointing():
            model(values(ROWS, SIZE)).sum().backward()

    ranks = VirtualRanks(2)
    ranks.run(run)
    assert ranks.ranks[0].started == []


def test_mask_of_all_layers_is_kept_whole_from_the_region_on_that_makes_it_cheaper() -> None:
    """As many parts as there are ranks are no less than the tensor. Later steps know."""

    def run(rank: Rank) -> None:
        modules = [checkpoint_wrapper(Masked(), partition=rank.partition) for _ in range(4)]
        for _ in range(2):
            x, mask = values(ROWS, SIZE).requires_grad_() * 1, contiguous()
            for module in modules:
                x = module(x, mask)
            x.sum().backward()

    one, two = part_bytes(BYTES, 3), 2 * part_bytes(BYTES, 3)
    ranks = VirtualRanks(3)
    ranks.run(run)
    expected = 4 * [MESSAGE] + [one, one, two, two] + 4 * [one]
    assert [rank.started for rank in ranks.ranks] == 3 * [expected]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(x) * mask


# What differs between ranks.


def test_what_differs_is_kept_whole_and_said_once() -> None:
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).exp()

    def run(number: int, call: Callable[..., Tensor]) -> list[Tensor | None]:
        found = []
        for step in range(2):
            x, y = (values(ROWS, SIZE, seed=seed).requires_grad_() for seed in (step, 50 + number))
            call(forward, x * 1, y=y * 1).sum().backward()
            found += [x.grad, y.grad]
        return found

    ranks = VirtualRanks(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = ranks.run(
            lambda rank: run(rank.number, partial(checkpoint, partition=rank.partition))
        )
    for number, actual in enumerate(results):
        assert_same_bits(actual, run(number, plain))
    assert ranks.ranks[0].started == [MESSAGE] + 2 * [part_bytes(BYTES, 2)]
    texts = [str(w.message) for w in caught if "partition" in str(w.message)]
    assert len(texts) == 2  # one for each rank
    for part in ("forward differ", "argument 'y' (50% of the bytes)", "partition=mesh['tp']"):
        assert part in texts[0]


@pytest.mark.parametrize("other", [values(ROWS, SIZE + 1), values(ROWS, SIZE).half()])
def test_other_metadata_is_kept_whole(other: Tensor) -> None:
    def run(rank: Rank) -> list[Tensor]:
        return recomputed_arguments(rank, [other if rank.number == 1 else contiguous(), half()])

    ranks = VirtualRanks(2)
    with pytest.warns(UserWarning, match="differ between the ranks"):
        results = ranks.run(run)
    assert torch.equal(results[1][0], other)
    assert torch.equal(results[0][0], contiguous())
    assert ranks.ranks[0].started == [MESSAGE, part_bytes(half().nbytes, 2)]


def test_another_number_of_tensors_keeps_all_whole() -> None:
    def run(rank: Rank) -> int:
        return len(recomputed_arguments(rank, [contiguous()] * 1 + [half()] * rank.number))

    ranks = VirtualRanks(2)
    with pytest.warns(UserWarning, match="differ between the ranks"):
        assert ranks.run(run) == [1, 2]
    assert ranks.ranks[0].started == ranks.ranks[1].started == [MESSAGE]


def one_bit(x: Tensor) -> None:
    x.view(torch.int32)[-1, -1] ^= 1


def sign_of_zero(x: Tensor) -> None:
    x[0, 0] = -0.0


def two_rows_exchanged(x: Tensor) -> None:
    x[[0, 1]] = x[[1, 0]]


def two_signs_exchanged(x: Tensor) -> None:
    x[0, 1], x[0, 3] = -x[0, 1], -x[0, 3]


@pytest.mark.parametrize("change", [one_bit, sign_of_zero, two_rows_exchanged, two_signs_exchanged])
def test_checksum_sees(change: Callable[[Tensor], None]) -> None:
    """Values whose words are alike but for the highest bit among them."""

    def run(rank: Rank) -> None:
        x = torch.zeros(ROWS, SIZE)
        x[0, 1], x[0, 3], x[1, 1] = 1.0, -1.0, 3.0
        if rank.number == 1:
            change(x)
        recomputed_arguments(rank, [x])

    ranks = VirtualRanks(2)
    with pytest.warns(UserWarning, match="differ between the ranks"):
        ranks.run(run)
    assert ranks.ranks[0].started == [MESSAGE]


def late_difference(rank: Rank) -> None:
    module = checkpoint_wrapper(layer(), partition=rank.partition)
    for step in range(2):
        x = values(ROWS, SIZE, seed=step * rank.number).requires_grad_()
        module(x * 1).sum().backward()


def test_debug_compares_every_call() -> None:
    ranks = VirtualRanks(2)
    with set_checkpoint_debug_enabled(True), pytest.warns(UserWarning, match="100% of the bytes"):
        ranks.run(late_difference)
    assert ranks.ranks[0].started == [MESSAGE, part_bytes(BYTES, 2), MESSAGE]
    ranks = VirtualRanks(2)
    ranks.run(late_difference)
    assert ranks.ranks[0].started == [MESSAGE, part_bytes(BYTES, 2), part_bytes(BYTES, 2)]


def test_calls_of_another_structure_are_compared_anew() -> None:
    """`y` is in the place of `x` there, and was never found alike."""

    def forward(x: Tensor | None, y: Tensor | None) -> Tensor:
        return ((x if y is None else y) * 2).exp()  # type: ignore[operator]

    def run(rank: Rank) -> None:
        for step in range(4):
            x = values(ROWS, SIZE, seed=rank.number * (step % 2)).requires_grad_() * 1
            args = (None, x) if step % 2 else (x, None)
            checkpoint(forward, *args, partition=rank.partition).sum().backward()

    ranks = VirtualRanks(2)
    with pytest.warns(UserWarning, match="positional argument 1"):
        ranks.run(run)
    part = part_bytes(BYTES, 2)
    assert ranks.ranks[0].started == [MESSAGE, part, MESSAGE, part]


def test_another_order_of_regions_is_an_error_where_ranks_compare() -> None:
    def run(rank: Rank) -> None:
        known = checkpoint_wrapper(layer(), partition=rank.partition)
        known(values(ROWS, SIZE).requires_grad_() * 1).sum().backward()
        if rank.number == 1:  # a forward that others do not run
            known(values(ROWS, SIZE).requires_grad_() * 1)
        new = checkpoint_wrapper(layer(), partition=rank.partition)
        with pytest.raises(RuntimeError, match="must call the same regions in the same order"):
            new(values(ROWS, SIZE).requires_grad_() * 1)

    VirtualRanks(2).run(run)


# Order and time.


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


def starts(ranks: VirtualRanks) -> list[int]:
    """Of the gathers of regions, the bytes; the same on all ranks."""
    first, *others = ([size for size in rank.started if size != MESSAGE] for rank in ranks.ranks)
    assert all(other == first for other in others)
    return first


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
        two.sum().backward()
        one.sum().backward()

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
    assert _C.live_regions() == 0


# With what else a region may have.


@pytest.mark.parametrize("count", [2, 3])
def test_parts_are_offloaded(count: int, tmp_path: Path) -> None:
    expected = gradients(body(), values(ROWS, SIZE))
    before = {place.directory: place.out.bytes for place in memopt.offload_stats().places}
    ranks = VirtualRanks(count)
    for actual in ranks.run(lambda r: gradients(wrapped(r, offload=tmp_path), values(ROWS, SIZE))):
        assert_same_bits(actual, expected)
    written = {place.directory: place.out.bytes for place in memopt.offload_stats().places}
    assert written[str(tmp_path)] - before.get(str(tmp_path), 0) == (
        count * 3 * part_bytes(BYTES, count)
    )
    assert starts(ranks) == 3 * [part_bytes(BYTES, count)]


def test_recipes_autocast_and_early_stop() -> None:
    def made() -> nn.Module:
        block = nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE), nn.GELU())
        generator = torch.Generator().manual_seed(0)
        for parameter in block.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        model = nn.Sequential(block, nn.Linear(SIZE, SIZE))
        nn.init.eye_(model[1].weight)
        nn.init.zeros_(model[1].bias)
        return model

    def run(rank: Rank | None) -> list[Tensor]:
        model = made()
        memopt.convert(model)
        if rank is not None:
            checkpoint_wrapper(model[0], partition=rank.partition)
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(model, values(ROWS, SIZE))

    expected = run(None)
    for actual in VirtualRanks(2).run(run):
        assert_same_bits(actual, expected)


def test_copies_and_settings() -> None:
    rank = VirtualRanks(2).ranks[0]
    module = checkpoint_wrapper(layer(), partition=rank.partition)
    twin = copy.deepcopy(module)
    settings = "_memopt_checkpoint_settings"
    assert twin.__dict__[settings].partition is rank.partition
    with pytest.raises(TypeError, match="must be of a process group to be pickled"):
        pickle.dumps(module)
    assert checkpoint_wrapper(module).__dict__[settings].partition is None


def test_without_a_process_group_is_an_error_that_leaves_the_module() -> None:
    module = layer()
    for call in (
        lambda: checkpoint_wrapper(module, partition=True),
        lambda: checkpoint(module, torch.ones(1), partition=True),
        lambda: memopt.apply_checkpointing(nn.Sequential(module), nn.Linear, partition=True),
    ):
        with pytest.raises(ValueError, match="partition needs torch.distributed's process group"):
            call()
    assert type(module) is nn.Sequential
