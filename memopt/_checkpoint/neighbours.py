"""Regions that follow one another, joined into segments where that lowers the peak.

A chain of n regions keeps what is passed on at n places, and takes what one of them needs when it
is recomputed. Joined in segments it keeps less and takes more at a time: with alike regions the
least is near segments of sqrt(n p / w), of p bytes passed on and w taken by one (Chen et al.,
arXiv:1604.06174). Nothing runs more often. For each bound on what a segment may take, the cheapest
division is found by going along the chain; a predicted step says whether the best one is lower.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from memopt._checkpoint.best import RegionSet
from memopt.assignment import Paths
from memopt.memory.calls.tree import CallTree, ModuleCall

WORTH_JOINING = 0.98
"""The share of the peak below which a division has to get."""
_LONGEST = 32
"""The number of regions in a segment, at most."""


@dataclass(frozen=True)
class Chain:
    """Regions of which each gets what the one before it returned."""

    paths: Paths
    passed: tuple[int, ...]
    """Bytes that are kept between each and the next, and not if they are joined."""
    kept: tuple[int, ...]
    spare: tuple[int, ...]
    """The most that the backward of each takes above what it keeps."""

    def working(self, first: int, last: int) -> int:
        """The most that a segment takes when it is recomputed."""
        inside = sum(self.kept[first : last + 1]) + sum(self.passed[first:last])
        return inside + max(self.spare[first : last + 1])


def best_segments(
    tree: CallTree, cut: RegionSet, without: Collection[str]
) -> tuple[tuple[Paths, ...], RegionSet]:
    """The segments of several regions with the least peak by sums, and bytes of the cut with them;
    none where no division gets the peak below `WORTH_JOINING`.

    Args:
        cut: the regions.
        without: paths of those that stay alone.
    """
    chains = [chain for chain in _chains(tree, cut, without) if len(chain.paths) > 1]
    best: tuple[tuple[Paths, ...], RegionSet] = (), cut
    for bound in sorted({bound for chain in chains for bound in _bounds(chain)}):
        segments: list[Paths] = []
        stays, working = cut.stays, cut.working
        for chain in chains:
            for first, last in _divided(chain, bound):
                if first < last:
                    segments.append(chain.paths[first : last + 1])
                    stays -= sum(chain.passed[first:last])
                    working = max(working, chain.working(first, last))
        found = replace(cut, stays=stays, working=working)
        if found.peak < min(best[1].peak, WORTH_JOINING * cut.peak):
            best = tuple(segments), found
    return best


def _bounds(chain: Chain) -> Iterator[int]:
    """The most that segments of each length take."""
    number = len(chain.paths)
    for length in range(2, min(number, _LONGEST) + 1):
        yield max(chain.working(i, i + length - 1) for i in range(number - length + 1))


def _divided(chain: Chain, bound: int) -> list[tuple[int, int]]:
    """The segments, first and last, that take no more than `bound` and keep the least between."""
    costs: list[float] = [0]  # of the first n regions, with what is kept behind them
    begins: list[int] = []
    for last in range(len(chain.paths)):
        least, begin = math.inf, last
        for first in range(last, max(-1, last - _LONGEST), -1):
            if first < last and chain.working(first, last) > bound:
                break
            if costs[first] < least:
                least, begin = costs[first], first
        behind = chain.passed[last] if last < len(chain.passed) else 0
        costs.append(least + behind)
        begins.append(begin)
    found: list[tuple[int, int]] = []
    last = len(begins) - 1
    while last >= 0:
        found.append((begins[last], last))
        last = begins[last] - 1
    return found[::-1]


def _chains(tree: CallTree, cut: RegionSet, without: Collection[str]) -> Iterator[Chain]:
    """Regions that are called once, one after another by the same module."""
    calls = {n: c for n, c in enumerate(tree.calls) if c.path in cut.paths}
    once = [
        number
        for number, call in calls.items()
        if call.with_gradients
        and call.path not in without
        and tree.calls_of(call.path) == (number,)
    ]
    passed = _passed(tree, list(calls), once)
    chain: list[int] = []
    for number in once:
        if chain and not (
            tree.calls[chain[-1]].parent == tree.calls[number].parent and passed[chain[-1], number]
        ):
            yield _chain(tree.calls, chain, passed)
            chain = []
        chain.append(number)
    if chain:
        yield _chain(tree.calls, chain, passed)


def _chain(
    calls: Sequence[ModuleCall], numbers: list[int], passed: Counter[tuple[int, int]]
) -> Chain:
    mine = [calls[number] for number in numbers]
    return Chain(
        tuple(call.path for call in mine),
        tuple(passed[pair] for pair in pairwise(numbers)),
        tuple(call.kept_bytes for call in mine),
        tuple(max(0, call.backward - call.kept_bytes) for call in mine),
    )


def _passed(tree: CallTree, regions: list[int], once: list[int]) -> Counter[tuple[int, int]]:
    """Bytes that only two regions, one after the other, have to do with: made in the first one,
    returned by it to the second, and kept for that alone.
    """
    region_of = _regions_around(tree, regions)
    receivers: defaultdict[int, set[int]] = defaultdict(set)
    for region in regions:
        for number in tree.calls[region].inputs:
            receivers[number].add(region)
    found: Counter[tuple[int, int]] = Counter()
    for first, second in pairwise(once):
        for number in {*tree.calls[first].outputs}.intersection(tree.calls[second].inputs):
            storage = tree.storages[number]
            is_theirs = (
                region_of[storage.maker] == first
                and {region_of[saver] for saver in storage.savers} <= {first, second}
                and receivers[number] == {second}
            )
            found[first, second] += storage.nbytes if is_theirs else 0
    return found


def _regions_around(tree: CallTree, regions: list[int]) -> list[int]:
    """The region that each call is in, by number; -1 for none."""
    are_regions = set(regions)
    found: list[int] = []
    for number, call in enumerate(tree.calls):
        around = found[call.parent] if call.parent >= 0 else -1
        found.append(around if around >= 0 else number if number in are_regions else -1)
    return found
