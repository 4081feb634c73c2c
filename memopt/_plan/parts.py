"""Parts of a block that are worth a region of their own, by its tree of calls.

A region around a call drops what is kept for backward inside of it, keeps arguments that nothing
else does, and costs one more forward of it. Sets of calls, none inside another, are taken in the
order of most bytes per second of recompute: the upper hull of (seconds, bytes) of all sets. The
hull of a call is that of its children's sum (hulls add edge by edge, the steepest first), and of a
region around all of it. So the work grows with the number of calls times the points of a hull.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from memopt._plan.choices import CHUNKED, EACH, INSIDE, LEVELS
from memopt.assignment import Choice
from memopt.memory.calls.tree import CallTree, ModuleCall
from memopt.memory.paths import is_inside, overlap
from memopt.memory.speed import Speed

_LEAST_GAIN = 0.03
"""The share of its block's bytes that a part has to drop."""
_HALF = 0.4
"""The share of the bytes that all parts drop from which on a set is the first level."""
_MOST_CHUNKS = 8
"""More take more time, and what is beside the part is then the most of its block."""
_REGION_SECONDS = 5e-6
"""The host's time for a region."""


@dataclass(frozen=True)
class BlockParts:
    """Sets of a block's parts, by paths from the block."""

    levels: tuple[tuple[str, ...], ...] = ()
    """Sets, the smaller ones first; at most as many as LEVELS."""
    inside: tuple[str, ...] = ()
    """The parts that are regions inside the block's."""
    rows: tuple[str, ...] = ()
    """The parts that may run in chunks of rows; the empty path is the block itself."""
    chunks: int | None = None
    """The number of chunks that they run in."""

    @property
    def every(self) -> tuple[str, ...]:
        """Every part that is in some set."""
        return tuple(dict.fromkeys(part for those in self.levels for part in those))

    def of(self, choice: Choice) -> Choice:
        """The choice with the parts that its names stand for."""
        if CHUNKED not in choice.parts:
            return replace(choice, parts=self._named(choice)) if choice.parts else choice
        others = self._named(replace(choice, parts=tuple(p for p in choice.parts if p != CHUNKED)))
        if not self.rows:
            return replace(choice, parts=others)
        if self.rows == ("",):  # in each chunk the block runs whole
            each = tuple(part for part in others if part == EACH)
            return replace(choice, checkpoint=True, parts=each, chunks=self.chunks)
        apart = [part for part in others if part == EACH or not self._meets_rows(part)]
        return replace(choice, parts=(*apart, *self.rows), chunks=self.chunks, in_chunks=self.rows)

    def _meets_rows(self, part: str) -> bool:
        """Whether a part is one that may run in chunks, is inside of one or around one."""
        return any(overlap(part, row) for row in self.rows)

    def _named(self, choice: Choice) -> tuple[str, ...]:
        found: list[str] = []
        for name in choice.parts:
            if name == EACH:
                found.append(name)
            elif name == INSIDE:
                found += self.inside
            elif name in LEVELS:
                number = min(LEVELS.index(name), len(self.levels) - 1)
                found += self.levels[number] if self.levels else ()
            else:
                found.append(name)
        return tuple(found)


NO_PARTS = BlockParts()


class _Point(NamedTuple):
    """A set of calls that are regions."""

    seconds: float
    """Seconds of the recompute."""
    gain: int
    """Bytes that are not kept."""
    paths: tuple[str, ...]


_NOTHING = _Point(0.0, 0, ())


def block_parts(
    tree: CallTree, speed: Speed, blocks: Collection[str], without: Collection[str]
) -> dict[str, BlockParts]:
    """The parts of blocks, by path, each seen at its first call with gradients.

    Args:
        without: paths of modules that are no regions.
    """
    children = _children(tree)
    calls_of: defaultdict[str, list[int]] = defaultdict(list)
    for number, call in enumerate(tree.calls):
        if call.with_gradients:
            calls_of[call.path].append(number)
    found = {}
    for path in blocks:
        if calls_of[path]:
            once = _calls_once(tree, children, calls_of[path][0])
            least = _LEAST_GAIN * tree.calls[calls_of[path][0]].kept_bytes
            search = _Search(tree, speed, children, once.difference(without), least)
            found[path] = _levels(search.below(calls_of[path][0]), path)
    return found


def _children(tree: CallTree) -> Mapping[int, list[int]]:
    """The numbers of the calls directly inside each call."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for number, call in enumerate(tree.calls):
        children[call.parent].append(number)
    return children


def row_candidates(tree: CallTree, block: str, without: Collection[str]) -> list[str]:
    """Paths of calls in a block, itself among them, that may be worth running in chunks of rows:
    they compute products, and hold more inside than a share of what they return. Those around
    others come first.
    """
    children = _children(tree)
    first = next((n for n, c in enumerate(tree.calls) if c.path == block and c.with_gradients), -1)
    if first < 0:
        return []
    once = _calls_once(tree, children, first) | {block}
    found: dict[str, None] = {}
    for call in tree.calls[first:]:
        fits = call.path in once and call.path not in without and _can_be_region(call)
        if fits and call.flops and call.keeps_inside:
            found[call.path] = None
    return list(found)


def chunks_for(tree: CallTree, path: str) -> int:
    """The number of chunks in which the inner tensors of one take about as much as what the call
    returns.
    """
    call = next(call for call in tree.calls if call.path == path and call.with_gradients)
    inner = max(call.kept_bytes, call.backward - call.input_bytes)
    return min(_MOST_CHUNKS, max(2, inner // max(1, call.output_bytes)))


def _calls_once(tree: CallTree, children: Mapping[int, Sequence[int]], block: int) -> set[str]:
    """The paths of modules below a block that one call of it calls once."""
    seen: set[str] = set()
    again: set[str] = set()
    todo = list(children.get(block, ()))
    while todo:
        number = todo.pop()
        path = tree.calls[number].path
        (again if path in seen else seen).add(path)
        todo += children.get(number, ())
    around = tree.calls[block].path
    return {path for path in seen - again if is_inside(path, around)}


@dataclass(frozen=True)
class _Search:
    """Upper hulls of sets of calls."""

    tree: CallTree
    speed: Speed
    children: Mapping[int, Sequence[int]]
    may_be: set[str]
    least: float
    """The bytes that a region has to drop."""

    def below(self, number: int) -> list[_Point]:
        """Sets of calls that a call makes."""
        hull = [_NOTHING]
        for child in self.children.get(number, ()):
            hull = _sum(hull, self._of(child))
        return hull

    def _of(self, number: int) -> list[_Point]:
        hull = self.below(number)
        call, storages = self.tree.calls[number], self.tree.storages
        gain = call.kept_bytes - sum(
            storages[n].nbytes for n in call.inputs if not storages[n].savers
        )
        if call.path not in self.may_be or not _can_be_region(call) or gain < self.least:
            return hull
        again = self.speed.seconds(call, call.operators) + _REGION_SECONDS
        return _upper([*hull, _Point(again, gain, (call.path,))])


def _can_be_region(call: ModuleCall) -> bool:
    odd = call.returns_view or call.writes_inputs or call.inputs_written
    return call.with_gradients and not odd


def _upper(points: Sequence[_Point]) -> list[_Point]:
    """Keep the points on the upper hull, from nothing on to the most bytes."""
    hull: list[_Point] = []
    for point in sorted(points, key=lambda p: (p.seconds, -p.gain)):
        if hull and point.gain <= hull[-1].gain:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(one: _Point, other: _Point) -> float:
    return (other.gain - one.gain) / max(other.seconds - one.seconds, 1e-30)


def _sum(one: list[_Point], other: list[_Point]) -> list[_Point]:
    """The hull of the sums of two hulls' points."""
    found = [_Point(0.0, 0, ())]
    a = b = 0
    while a + 1 < len(one) or b + 1 < len(other):
        steps = [
            _slope(hull[at], hull[at + 1]) if at + 1 < len(hull) else -1.0
            for hull, at in ((one, a), (other, b))
        ]
        a, b = (a + 1, b) if steps[0] >= steps[1] else (a, b + 1)
        x, y = one[a], other[b]
        found.append(_Point(x.seconds + y.seconds, x.gain + y.gain, (*x.paths, *y.paths)))
    return found


def _levels(hull: list[_Point], block: str) -> BlockParts:
    points = hull[1:]
    if not points:
        return NO_PARTS
    last = points[-1]
    few = next(point for point in points if point.gain >= _HALF * last.gain)
    sets = [
        tuple(path[len(block) + 1 :] for path in point.paths)
        for point in dict.fromkeys((few, last))
    ]
    return BlockParts(tuple(sets), sets[-1])
