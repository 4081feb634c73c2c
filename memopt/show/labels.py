"""Places for the names of points in a drawing, so that no two overlap. y goes down."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        is_beside = self.right <= other.left or other.right <= self.left
        return not (is_beside or self.bottom <= other.top or other.bottom <= self.top)

    def is_within(self, other: Box) -> bool:
        is_between = other.left <= self.left and self.right <= other.right
        return is_between and other.top <= self.top and self.bottom <= other.bottom

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """The place in the box that is nearest to a point."""
        return min(max(x, self.left), self.right), min(max(y, self.top), self.bottom)


class Named(NamedTuple):
    """A point that gets a name."""

    x: float
    y: float
    width: float
    """The width of the name."""


def label_boxes(
    points: Sequence[Named],
    frame: Box,
    line: float,
    radius: float,
    paths: Iterable[Sequence[tuple[float, float]]] = (),
) -> list[Box]:
    """A box for the name of each point: within the frame, over no other name, over no point and not
    over a path. The first one has the first choice of places.

    Args:
        line: the height of a name.
        radius: of the points.
        paths: the corners of lines that are drawn in steps, to the right and then up or down.
    """
    taken = [Box(p.x - radius, p.y - radius, p.x + radius, p.y + radius) for p in points]
    for (x, y), (to_x, to_y) in chain.from_iterable(map(pairwise, paths)):
        taken.append(Box(min(x, to_x), y - 1, max(x, to_x), y + 1))
        taken.append(Box(to_x - 1, min(y, to_y), to_x + 1, max(y, to_y)))
    boxes: list[Box] = []
    for point in points:
        places = (box for box in _places(point, frame, line, radius) if box.is_within(frame))
        free = (box for box in places if not any(map(box.meets, (*taken, *boxes))))
        crowded = Box(frame.left, frame.top, frame.left + point.width, frame.top + line)
        boxes.append(next(free, crowded))
    return boxes


def _places(point: Named, frame: Box, line: float, radius: float) -> Iterator[Box]:
    """Right and left of the point, from next to it to ever further above and below; then all over
    the drawing.
    """
    gap = radius + 3
    lines = int((frame.bottom - frame.top) // line)
    for number in range(lines):
        for top in (point.y - line / 2 - number * line, point.y - line / 2 + number * line):
            for left in (point.x + gap, point.x - gap - point.width, point.x - point.width / 2):
                yield Box(left, top, left + point.width, top + line)
    for number in range(lines):
        top = frame.top + number * line
        for column in range(int((frame.right - frame.left) // line)):
            left = frame.left + column * line
            yield Box(left, top, left + point.width, top + line)
