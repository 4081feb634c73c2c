"""Proves: partitions cover all stages with no empty segment; equal and sqrt cuts are as even as can
be; the optimal one has the least peak of all partitions and, among those, keeps the fewest bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given

from memopt._checkpoint.segments import (
    equal_segments,
    least_peak_segments,
    sqrt_segments,
)


def all_partitions(stages: int) -> Iterator[list[int]]:
    for cuts in itertools.product([False, True], repeat=stages - 1):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [stages]
        yield [end - start for start, end in zip([0, *ends], ends, strict=False)]


def optimal(saved: list[int], inputs: list[int]) -> list[int]:
    """The partition with the least peak of stages that share nothing."""
    regions = [list(itertools.accumulate(saved[start:])) for start in range(len(saved))]
    return least_peak_segments(regions, [row[-1] for row in regions], inputs)


def peak_and_kept(lengths: list[int], saved: list[int], inputs: list[int]) -> tuple[int, int]:
    """The peak of a partition and the bytes of input that it keeps, from the model's definition."""
    peaks, kept, start = [], 0, 0
    for number, length in enumerate(lengths, 1):
        if number < len(lengths):
            kept += inputs[start]
        peaks.append(kept + sum(saved[start : start + length]))
        start += length
    return max(peaks), kept


@pytest.mark.parametrize("stages", range(1, 30))
def test_equal_segments_differ_by_one_at_most_and_the_longer_come_first(stages: int) -> None:
    for segments in range(1, stages + 1):
        lengths = equal_segments(stages, segments)
        assert len(lengths) == segments
        assert sum(lengths) == stages
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] - lengths[-1] <= 1


@pytest.mark.parametrize(
    ("stages", "lengths"),
    [(1, [1]), (2, [2]), (3, [2, 1]), (9, [3, 3, 3]), (12, [4, 4, 4]), (13, [4, 3, 3, 3])],
)
def test_sqrt_segments(stages: int, lengths: list[int]) -> None:
    assert sqrt_segments(stages) == lengths


costs = st.integers(1, 9).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(0, 12), min_size=n, max_size=n)] * 2)
)


@given(costs)
def test_optimal_is_the_least_of_all_partitions(costs: tuple[list[int], list[int]]) -> None:
    lengths = optimal(*costs)
    assert min(lengths) >= 1
    assert sum(lengths) == len(costs[0])
    best = min(peak_and_kept(other, *costs) for other in all_partitions(len(costs[0])))
    assert peak_and_kept(lengths, *costs) == best


@given(costs, st.randoms(use_true_random=False))
def test_optimal_with_tensors_that_stages_share(costs, random) -> None:
    """Stages save tensors of a common pool; a region's own input counts as input only."""
    saved = [random.sample(range(8), random.randrange(5)) for _ in costs[0]]
    sizes = [random.randrange(12) for _ in range(8)]
    own = [random.randrange(8) for _ in costs[0]]
    stages = len(saved)

    def union(start: int, end: int, without: set[int]) -> int:
        return sum(sizes[t] for t in set().union(*saved[start:end]) - without)

    def peak(lengths: list[int]) -> tuple[int, int]:
        peaks, kept, start = [], 0, 0
        for length in lengths[:-1]:
            kept += sizes[own[start]]
            peaks.append(kept + union(start, start + length, {own[start]}))
            start += length
        return max([*peaks, kept + union(start, stages, set())]), kept

    lengths = least_peak_segments(
        [[union(i, j, {own[i]}) for j in range(i + 1, stages + 1)] for i in range(stages)],
        [union(i, stages, set()) for i in range(stages)],
        [sizes[t] for t in own],
    )
    assert peak(lengths) == min(peak(other) for other in all_partitions(stages))


@pytest.mark.parametrize("stages", [8, 12, 32, 48])
@pytest.mark.parametrize(("saved", "kept"), [(1, 1), (4, 1), (16, 1), (34, 2), (1, 8)])
def test_optimal_is_no_worse_than_any_equal_split(stages: int, saved: int, kept: int) -> None:
    costs = [saved] * stages, [kept] * stages
    best, _ = peak_and_kept(optimal(*costs), *costs)
    equal = [peak_and_kept(equal_segments(stages, k), *costs)[0] for k in range(1, stages + 1)]
    assert best <= min(equal)
    assert best <= peak_and_kept(sqrt_segments(stages), *costs)[0]


def test_segments_of_equal_length_are_best_at_the_continuous_optimum() -> None:
    """k b + (L / k) a is least at k = sqrt(L a / b): here 32, where sqrt(L) is 8."""
    stages, saved, kept = 64, 16, 1
    peaks = {
        k: peak_and_kept(equal_segments(stages, k), [saved] * stages, [kept] * stages)[0]
        for k in range(1, stages + 1)
        if stages % k == 0
    }
    assert min(peaks, key=lambda k: peaks[k]) == math.sqrt(stages * saved / kept)
    assert peaks[32] < peaks[8] / 2


def test_a_stack_of_transformer_blocks() -> None:
    """Each block saves 16 times its input: here the sqrt rule is worse than every block alone."""
    costs = [16] * 32, [1] * 32
    assert peak_and_kept(optimal(*costs), *costs)[0] == 40
    assert peak_and_kept([1] * 32, *costs)[0] == 47
    assert peak_and_kept(sqrt_segments(32), *costs)[0] == 98


@pytest.mark.parametrize(
    ("saved", "inputs", "lengths"),
    [
        ([5], [3], [1]),
        ([0, 0, 0], [0, 0, 0], [3]),
        ([4, 4, 4], [100, 100, 100], [3]),  # a kept input costs more than all that is saved
        ([4, 4, 4], [0, 0, 0], [1, 1, 1]),
        ([8, 1, 1, 1], [1, 1, 1, 1], [1, 3]),
    ],
)
def test_optimal_of_plain_examples(saved: list[int], inputs: list[int], lengths: list[int]) -> None:
    assert optimal(saved, inputs) == lengths


def test_optimal_counts_large_numbers_exactly() -> None:
    gib = 2**30
    costs = [gib * 100 + 1, gib * 100, gib * 100], [1, 2, 1]
    lengths = optimal(*costs)
    assert peak_and_kept(lengths, *costs) == (gib * 100 + 3, 3)
