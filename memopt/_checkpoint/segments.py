"""Cutting a chain of stages into contiguous segments: pure functions of numbers.

A partition is the list of its segments' lengths. All segments but the last are checkpointed
regions; the last runs plainly, since backward would need its saved tensors at once.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence


def equal_segments(stages: int, segments: int) -> list[int]:
    """`stages` stages in `segments` segments whose lengths differ by one at most.

    The longer ones come first: the peak of a segment counts the inputs kept for the segments before
    it, so that the early ones may be larger. Both are at least 1, `segments` at most `stages`.
    """
    length, longer = divmod(stages, segments)
    return [length + 1] * longer + [length] * (segments - longer)


def sqrt_segments(stages: int) -> list[int]:
    """The rule of Chen et al. (2016): round(sqrt(stages)) equal segments.

    Least memory only where a stage saves as many bytes as it gets for input.
    """
    return equal_segments(stages, round(math.sqrt(stages)))


def least_peak_segments(
    region_bytes: Sequence[Sequence[int]], last_bytes: Sequence[int], input_bytes: Sequence[int]
) -> list[int]:
    """The partition with the least peak of activation memory, for stages of any cost.

    With a_i bytes kept for backward by stage i and b_i bytes of input of stage i, a partition into
    segments j = 1..k that begin at stages s_1 = 0 < s_2 < ... < s_k has

        A_j  = sum of a_i over the stages i of segment j
        peak = max over j of (b_(s_1) + ... + b_(s_j) + A_j), where b_(s_k) counts as 0

    since the backward of a region needs its own recomputed tensors and the kept inputs of it and of
    the regions before, and nothing is kept for the last segment, which is no region. For L stages
    of equal cost and segments of equal length that is k b + (L / k) a, with its least value at
    k = sqrt(L a / b). The partition found here is the least of all 2^(L-1), whose lengths may
    differ. Storages that several stages of a segment save, or that a region keeps as its input too,
    count once: A_j is given for each region, not summed here.

    Found by bisection over the peak; whether a peak can be held is decided by the least bytes of
    input that must be kept when the stages before i are cut into regions, for each i. That takes
    O(L^2) steps, times the logarithm of the bytes.

    Args:
        region_bytes: in row i, at n - 1, A of a region of the n stages from i on, without its
            input. Must not fall along a row.
        last_bytes: at i, what the stages from i to the end save when they are no region.
        input_bytes: at i, b_i, what is kept for a region that begins with stage i.

    Returns:
        The length of each segment. Of several partitions with the least peak one that keeps the
        fewest bytes of input and, among those, has the longest last segment.
    """
    costs = region_bytes, last_bytes, input_bytes
    # One segment, which is no region, holds last_bytes[0]: no more is ever needed.
    peak = bisect.bisect_left(
        range(last_bytes[0]), True, key=lambda peak: _cut_under(peak, *costs) is not None
    )
    lengths = _cut_under(peak, *costs)
    assert lengths is not None
    return lengths


def _cut_under(
    peak: int,
    region_bytes: Sequence[Sequence[int]],
    last_bytes: Sequence[int],
    input_bytes: Sequence[int],
) -> list[int] | None:
    """A partition within `peak` that keeps the fewest bytes of input; None if there is none."""
    stages = len(last_bytes)
    # For each stage: the least bytes of input kept if the stages before it are cut into regions,
    # and where the last of these regions begins.
    kept: list[float] = [0, *[math.inf] * (stages - 1)]
    begins = [0] * stages
    for start in range(stages - 1):
        with_own = kept[start] + input_bytes[start]
        for end, saved in enumerate(region_bytes[start][:-1], start + 1):
            if with_own + saved > peak:
                break
            if with_own < kept[end]:
                kept[end], begins[end] = with_own, start
    fitting = [start for start in range(stages) if kept[start] + last_bytes[start] <= peak]
    if not fitting:
        return None
    start = min(fitting, key=lambda start: kept[start])
    lengths = [stages - start]
    while start:
        lengths.append(start - begins[start])
        start = begins[start]
    return lengths[::-1]
