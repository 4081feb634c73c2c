"""Step time against peak, drawn by matplotlib."""

from __future__ import annotations

from typing import Any

from memopt._plan.curve import Curve
from memopt._plan.planned import Planned
from memopt.memory.sizes import MB
from memopt.show.labels import Box, Named, label_boxes

_LINE, _POINT, _CHOSEN, _BUDGET = "#3b7dd8", "#5f6b76", "#c8467c", "#c0392b"
_TEXT = 8
"""Points of type."""


def draw_curve(figure: Any, plan: Planned, curve: Curve) -> None:
    """Draw the plans of all budgets and the usual settings, into a matplotlib Figure."""
    axes = figure.subplots()
    axes.step(
        [point.peak / MB for point in curve.plans],
        [1e3 * point.seconds for point in curve.plans],
        where="post",
        color=_LINE,
        label="plans, over all budgets",
    )
    named = [("this plan", plan.peak / MB, 1e3 * plan.seconds, _CHOSEN)]
    named += [(p.name, p.peak / MB, 1e3 * p.seconds, _POINT) for p in curve.settings]
    for _, x, y, color in named:
        sign, order = ("o", 4) if color == _CHOSEN else ("s", 3)
        axes.plot(x, y, sign, color=color, markersize=5, zorder=order)
    axes.set_xlabel("peak of the step, MB")
    timed = "measured by block" if plan.is_timed else "estimated for a GPU"
    axes.set_ylabel(f"forward and backward, ms ({timed})")
    axes.set_title(f"{plan.model}: what each budget costs")
    axes.margins(x=0.12, y=0.12)
    axes.autoscale_view()
    axes.autoscale(False)
    if axes.get_xlim()[0] <= plan.budget / MB <= axes.get_xlim()[1]:
        axes.axvline(plan.budget / MB, color=_BUDGET, linestyle="--", linewidth=1, label="budget")
    figure.legend(frameon=False, fontsize=_TEXT, loc="outside lower center", ncols=2)
    axes.grid(alpha=0.25)
    paths = [[(point.peak / MB, 1e3 * point.seconds) for point in curve.plans]]
    paths.append([(plan.budget / MB, y) for y in reversed(axes.get_ylim())])
    _write_names(figure, axes, named, paths)


def _write_names(
    figure: Any,
    axes: Any,
    named: list[tuple[str, float, float, str]],
    paths: list[list[tuple[float, float]]],
) -> None:
    """Names stand beside the points, none over another, over the line of plans or the budget's."""
    figure.draw_without_rendering()  # places are in pixels: the axes must have theirs
    pixels = figure.dpi / 72
    extent = axes.get_window_extent()
    frame = Box(extent.x0, -extent.y1, extent.x1, -extent.y0)
    ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
    texts = [
        axes.text(0, 0, name, fontsize=_TEXT, color=color, bbox=ground)
        for name, _, _, color in named
    ]
    points = []
    for text, (_, x, y, _) in zip(texts, named, strict=True):
        across, up = axes.transData.transform((x, y))
        points.append(Named(across, -up, text.get_window_extent().width))
    in_pixels = [[(x, -y) for x, y in axes.transData.transform(path)] for path in paths]
    boxes = label_boxes(points, frame, 1.5 * _TEXT * pixels, 4 * pixels, in_pixels)
    for text, point, box in zip(texts, points, boxes, strict=True):
        to_x, to_y = box.nearest(point.x, point.y)
        place = box.left, -box.bottom + 0.4 * _TEXT * pixels
        text.set_position(axes.transData.inverted().transform(place))
        line = axes.transData.inverted().transform([(point.x, -point.y), (to_x, -to_y)])
        axes.plot(*line.T, color=text.get_color(), linewidth=0.5)
    figure.set_layout_engine("none")
