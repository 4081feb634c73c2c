"""Figures, drawn by matplotlib, which is imported when one is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

GREY = "#8a8a8a"
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": "#333333",
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": "#333333",
    "ytick.labelcolor": "#333333",
}


def write_figure(path: Path, size: tuple[float, float], draw: Callable[[Any], None]) -> None:
    """Write what `draw` draws into a matplotlib Figure of so many inches."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=size, dpi=150, layout="constrained")
        draw(figure)
        figure.savefig(path)
