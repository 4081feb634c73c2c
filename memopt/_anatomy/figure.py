"""An anatomy's timeline, drawn by matplotlib."""

from __future__ import annotations

from typing import Any

from memopt._anatomy.findings import Findings
from memopt._anatomy.table import anatomy_title
from memopt.memory.pieces import CATEGORIES, in_words
from memopt.memory.sizes import MB, as_text
from memopt.show.figure import GREY
from memopt.show.timeline import COLORS


def draw_timeline(figure: Any, anatomy: Findings) -> None:
    """Draw the bytes of each category over the operators, into a matplotlib Figure."""
    trace = anatomy.trace
    instants = [point[0] for point in trace.timeline]
    layers = [
        [point[place] / MB for point in trace.timeline] for place in range(1, 1 + len(CATEGORIES))
    ]
    axes = figure.subplots()
    axes.stackplot(
        instants,
        *layers,
        labels=list(map(in_words, CATEGORIES)),
        colors=[COLORS[c] for c in CATEGORIES],
        step="post",
    )
    at = max(trace.timeline, key=lambda point: sum(point[1:]))[0]
    axes.annotate(
        f"peak {as_text(trace.peak.total)}\n{trace.peak.module or trace.peak.op}",
        (at, trace.peak.total / MB),
        xytext=(0, 14),
        textcoords="offset points",
        ha="center",
        arrowprops={"arrowstyle": "-|>"},
    )
    for phase in trace.phases:
        if phase.name != "before":
            axes.axvline(phase.begin, color=GREY, linestyle=":", linewidth=1)
            axes.text(phase.begin, 0, f" {phase.name}", fontsize=8, va="bottom")
    axes.set_ylim(0, 1.2 * trace.peak.total / MB)
    axes.margins(x=0)
    axes.set_xlabel("operators of one training step")
    axes.set_ylabel("MB")
    axes.set_title(anatomy_title(anatomy), fontsize=9, fontweight="normal")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1))
