"""Proves: what the ranks of a partition do not hold alike is found, by every bit, shape, dtype and
number, in the calls that compare; it is kept whole, with right gradients, and said so once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_debug_enabled

from memopt._checkpoint import (
    checkpoint,
    checkpoint_wrapper,
)
from tests.checkpoint.partitions import (
    BYTES,
    MESSAGE,
    ROWS,
    SIZE,
    contiguous,
    half,
    layer,
    part_bytes,
    recomputed_arguments,
    values,
)
from tests.checkpoint.support import plain
from tests.checkpoint.virtual_ranks import Rank, VirtualRanks
from tests.support.bits import assert_same_bits


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
    assert ranks.ranks[0].started == 2 * [MESSAGE, part_bytes(BYTES, 2)]
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


def differ_from_the_third_call_on(rank: Rank, calls: int) -> None:
    module = checkpoint_wrapper(layer(), partition=rank.partition)
    for call in range(calls):
        x = values(ROWS, SIZE, seed=rank.number if call >= 2 else 0).requires_grad_()
        module(x * 1).sum().backward()


@pytest.mark.parametrize("calls", [3, 9])
def test_first_second_fourth_and_eighth_call_compare(calls: int) -> None:
    part = part_bytes(BYTES, 2)
    ranks = VirtualRanks(2)
    if calls == 3:
        ranks.run(lambda rank: differ_from_the_third_call_on(rank, calls))
        expected = [MESSAGE, part, MESSAGE, part, part]
    else:
        with pytest.warns(UserWarning, match="100% of the bytes"):
            ranks.run(lambda rank: differ_from_the_third_call_on(rank, calls))
        expected = [MESSAGE, part, MESSAGE, part, part, MESSAGE, MESSAGE]
    assert [rank.started for rank in ranks.ranks] == [expected, expected]


def test_debug_compares_every_call() -> None:
    ranks = VirtualRanks(2)
    with set_checkpoint_debug_enabled(True), pytest.warns(UserWarning, match="100% of the bytes"):
        ranks.run(lambda rank: differ_from_the_third_call_on(rank, 3))
    part = part_bytes(BYTES, 2)
    assert ranks.ranks[0].started == [MESSAGE, part, MESSAGE, part, MESSAGE]


def test_debug_of_the_function_compares_every_call() -> None:
    def run(rank: Rank) -> None:
        for call in range(3):
            x = values(ROWS, SIZE, seed=rank.number if call == 2 else 0).requires_grad_() * 1
            checkpoint(layer(), x, partition=rank.partition, debug=True).sum().backward()

    ranks = VirtualRanks(2)
    with pytest.warns(UserWarning, match="100% of the bytes"):
        ranks.run(run)
    part = part_bytes(BYTES, 2)
    assert ranks.ranks[0].started == [MESSAGE, part, MESSAGE, part, MESSAGE]


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
    assert ranks.ranks[0].started == 2 * [MESSAGE, part, MESSAGE]


def test_another_order_of_regions_is_an_error_where_ranks_compare() -> None:
    def run(rank: Rank) -> None:
        known = checkpoint_wrapper(layer(), partition=rank.partition)
        for _ in range(2):
            known(values(ROWS, SIZE).requires_grad_() * 1).sum().backward()
        if rank.number == 1:  # a forward that others do not run
            known(values(ROWS, SIZE).requires_grad_() * 1)
        new = checkpoint_wrapper(layer(), partition=rank.partition)
        with pytest.raises(RuntimeError, match="must call the same regions in the same order"):
            new(values(ROWS, SIZE).requires_grad_() * 1)

    VirtualRanks(2).run(run)
