"""Step time against peak, drawn by matplotlib."""

from __future__ import annotations

from typing import Any

from memopt._plan.curve import Curve
from memopt._plan.planned import Planned
from memopt.memory.sizes import MB

_LINE, _POINT, _CHOSEN = "#3b7dd8", "#5f6b76", "#c8467c"


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
    axes.axvline(plan.budget / MB, color=_CHOSEN, linestyle=":", linewidth=1)
    axes.plot(
        plan.peak / MB, 1e3 * plan.seconds, "o", color=_CHOSEN, label="this plan, and its budget"
    )
    for number, point in enumerate(curve.settings):
        axes.plot(point.peak / MB, 1e3 * point.seconds, "s", color=_POINT, markersize=5)
        axes.annotate(
            point.name,
            (point.peak / MB, 1e3 * point.seconds),
            xytext=(6, 6 if number % 2 else -12),
            textcoords="offset points",
            fontsize=8,
            color=_POINT,
        )
    axes.set_xlabel("peak of the step, MB")
    timed = "measured by block" if plan.is_timed else "estimated for a GPU"
    axes.set_ylabel(f"forward and backward, ms ({timed})")
    axes.set_title(f"{plan.model}: what each budget costs")
    axes.margins(x=0.12, y=0.12)
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.25)
