"""Step time against peak over all budgets, as SVG: axes, a line, and points with names."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import NamedTuple

from memopt._plan.curve import Curve, Point
from memopt._plan.planned import Planned
from memopt.memory.sizes import MB, as_text
from memopt.show.axes import (
    CHARACTER,
    LINE,
    axis,
    axis_title,
    ticks,
)

_WIDTH, _HEIGHT = 1000, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 980, 30, 340
_MARGIN = 0.12
"""The share of the points' range that is left free around them for names."""
_RADIUS = 5


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: _Box) -> bool:
        is_beside = self.right <= other.left or other.right <= self.left
        return not (is_beside or self.bottom <= other.top or other.bottom <= self.top)

    def is_within(self, other: _Box) -> bool:
        is_between = other.left <= self.left and self.right <= other.right
        return is_between and other.top <= self.top and self.bottom <= other.bottom


class _Mark(NamedTuple):
    point: Point
    x: float
    y: float
    color: str


def curve_svg(plan: Planned, curve: Curve) -> str:
    """Time against peak; the plan and the usual settings as points with names."""
    chosen = Point("this plan", plan.peak, plan.seconds)
    points = [*curve.plans, *curve.settings, chosen]
    left, right = _around([point.peak / MB for point in points])
    low, high = _around([1e3 * point.seconds for point in points])

    def x(megabytes: float) -> float:
        return round(_LEFT + (megabytes - left) / (right - left) * (_RIGHT - _LEFT), 1)

    def y(ms: float) -> float:
        return round(_BOTTOM - (ms - low) / (high - low) * (_BOTTOM - _TOP), 1)

    def at(point: Point) -> tuple[float, float]:
        return x(point.peak / MB), y(1e3 * point.seconds)

    start, *rest = map(at, curve.plans)
    path = f"M{start[0]} {start[1]}" + "".join(f"H{x}V{y}" for x, y in rest)
    marks = [_Mark(chosen, *at(chosen), "#c8467c")]
    marks += [_Mark(point, *at(point), "#5f6b76") for point in curve.settings]
    timed = "measured" if plan.is_timed else "estimated for a GPU"
    return (
        f'<svg id="curve" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        f"{axis('left', ticks(low, high), y, _LEFT, _RIGHT)}"
        f"{axis('below', ticks(left, right, 8), x, _TOP, _BOTTOM)}"
        f"{axis_title(f'forward and backward, ms ({timed})', 4, 14, 'start')}"
        f"{axis_title('peak of the step, MB', _RIGHT, _BOTTOM + 2.5 * LINE, 'end')}"
        f'<path d="{path}" fill="none" stroke="#3b7dd8" stroke-width="2"/>'
        f"{''.join(_drawn(marks))}</svg>"
    )


def _around(values: list[float]) -> tuple[float, float]:
    """A range with room around them."""
    least, most = min(values), max(values)
    room = _MARGIN * (most - least) or 0.05 * most or 1.0
    return max(0.0, least - room), most + room


def _drawn(marks: list[_Mark]) -> Iterator[str]:
    """The first one's name has the first choice of places. It lies above the others."""
    taken = [_around_point(mark) for mark in marks]
    drawn = []
    for mark in marks:
        name = html.escape(mark.point.name)
        box = _free(mark, taken)
        taken.append(box)
        said = f"{name}: {as_text(mark.point.peak)}, {1e3 * mark.point.seconds:.4g} ms"
        drawn.append(
            f'<line x1="{mark.x}" y1="{mark.y}" x2="{_nearest(mark.x, box.left, box.right)}" '
            f'y2="{_nearest(mark.y, box.top, box.bottom)}" stroke="{mark.color}" '
            f'stroke-width=".7"/><circle cx="{mark.x}" cy="{mark.y}" r="{_RADIUS}" '
            f'fill="{mark.color}"><title>{said}</title></circle>'
            f'<text class="name" x="{box.left:.1f}" y="{box.bottom - 3.5:.1f}" '
            f'fill="{mark.color}">{name}</text>'
        )
    return reversed(drawn)


def _free(mark: _Mark, taken: list[_Box]) -> _Box:
    """The place for the name, next to the point, that meets nothing."""
    frame = _Box(_LEFT, _TOP, _RIGHT, _BOTTOM)
    places = [box for box in _places(mark) if box.is_within(frame)]
    return next(box for box in places if not any(map(box.meets, taken)))


def _places(mark: _Mark) -> Iterator[_Box]:
    """Right and left of the point, from next to it to ever further above and below; then all over
    the drawing.
    """
    width = CHARACTER * len(mark.point.name)
    for line in range(_HEIGHT // LINE):
        for down in (-line * LINE, line * LINE):
            top = mark.y - LINE / 2 + down
            for left in (mark.x + 8, mark.x - 8 - width, mark.x - width / 2):
                yield _Box(left, top, left + width, top + LINE)
    for top in range(_TOP, _BOTTOM, LINE):
        for left in range(_LEFT, _RIGHT, LINE):
            yield _Box(left, top, left + width, top + LINE)


def _around_point(mark: _Mark) -> _Box:
    return _Box(mark.x - _RADIUS, mark.y - _RADIUS, mark.x + _RADIUS, mark.y + _RADIUS)


def _nearest(value: float, low: float, high: float) -> float:
    return round(min(max(value, low), high), 1)
