"""Step time against peak over all budgets, as SVG: axes, a line, and points with names."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memopt._plan.curve import Curve, Point
from memopt._plan.planned import Planned
from memopt.memory.sizes import MB, as_text
from memopt.show.axes import CHARACTER, LINE, axis, axis_title, ticks
from memopt.show.labels import Box, Named, label_boxes

BROAD, NARROW = (1000, 400), (380, 380)
"""Sizes of a drawing: for a page as wide as a screen, and as wide as a telephone."""
_MARGIN = 0.12
"""The share of the points' range that is left free around them for names."""
_RADIUS = 5


class CurveMark(NamedTuple):
    """A point of the drawing, with what it says."""

    name: str
    said: str
    x: float
    y: float
    color: str
    radius: float = _RADIUS


def curve_svg(plan: Planned, curve: Curve, size: tuple[int, int] = BROAD) -> str:
    """Time against peak: the plan, its budget and the usual settings, with names.

    Args:
        size: width and height.
    """
    width, height = size
    frame = Box(56, 30, width - 10, height - 60)
    chosen = Point("this plan", plan.peak, plan.seconds)
    points = [*curve.plans, *curve.settings, chosen]
    left, right = _around([point.peak / MB for point in points])
    low, high = _around([1e3 * point.seconds for point in points])

    def x(megabytes: float) -> float:
        share = (megabytes - left) / (right - left)
        return round(frame.left + share * (frame.right - frame.left), 1)

    def y(ms: float) -> float:
        return round(frame.bottom - (ms - low) / (high - low) * (frame.bottom - frame.top), 1)

    def at(point: Point) -> tuple[float, float]:
        return x(point.peak / MB), y(1e3 * point.seconds)

    def mark(point: Point, color: str) -> CurveMark:
        said = f"{point.name}: {as_text(point.peak)}, {1e3 * point.seconds:.4g} ms"
        return CurveMark(point.name, said, *at(point), color)

    corners = list(map(at, curve.plans))
    start, *rest = corners
    path = f"M{start[0]} {start[1]}" + "".join(f"H{x}V{y}" for x, y in rest)
    marks = [mark(chosen, "#c8467c"), *(mark(point, "#5f6b76") for point in curve.settings)]
    budget, paths = "", [corners]
    if left <= plan.budget / MB <= right:
        across = x(plan.budget / MB)
        budget = (
            f'<line class="level" x1="{across}" x2="{across}" y1="{frame.top}" '
            f'y2="{frame.bottom}" stroke="#c0392b" stroke-width="2" stroke-dasharray="6 4"/>'
        )
        paths.append([(across, frame.top), (across, frame.bottom)])
        said = f"budget {as_text(int(plan.budget))}"
        marks.append(CurveMark(said, said, across, frame.top + LINE / 2, "#c0392b", 0))
    timed = "measured" if plan.is_timed else "estimated for a GPU"
    return (
        f'<svg class="drawing" width="{width}" viewBox="0 0 {width} {height}" role="img">'
        f"{axis('left', ticks(low, high), y, frame.left, frame.right)}"
        f"{axis('below', ticks(left, right, width // 90), x, frame.top, frame.bottom)}"
        f"{axis_title(f'forward and backward, ms ({timed})', 4, 14, 'start')}"
        f"{axis_title('peak of the step, MB', frame.right, frame.bottom, 'end', 2.5 * LINE)}"
        f'{budget}<path d="{path}" fill="none" stroke="#3b7dd8" stroke-width="2"/>'
        f"{''.join(_drawn(marks, frame, paths))}</svg>"
    )


def _around(values: list[float]) -> tuple[float, float]:
    """A range with space around them."""
    least, most = min(values), max(values)
    space = _MARGIN * (most - least) or 0.05 * most or 1.0
    return max(0.0, least - space), most + space


def _drawn(
    marks: Sequence[CurveMark], frame: Box, paths: Sequence[Sequence[tuple[float, float]]] = ()
) -> Iterator[str]:
    """Points and names, the first ones above the others."""
    named = [Named(mark.x, mark.y, CHARACTER * len(mark.name)) for mark in marks]
    boxes = label_boxes(named, frame, LINE, _RADIUS, paths)
    for mark, box in reversed(list(zip(marks, boxes, strict=True))):
        to_x, to_y = box.nearest(mark.x, mark.y)
        yield (
            f'<line x1="{mark.x}" y1="{mark.y}" x2="{to_x:.1f}" y2="{to_y:.1f}" '
            f'stroke="{mark.color}" stroke-width=".7"/><circle cx="{mark.x}" cy="{mark.y}" '
            f'r="{mark.radius}" fill="{mark.color}"><title>{html.escape(mark.said)}</title>'
            f'</circle><text class="name halo" x="{box.left:.1f}" y="{box.bottom - 3.5:.1f}" '
            f'fill="{mark.color}">{html.escape(mark.name)}</text>'
        )
