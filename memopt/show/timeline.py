"""The bytes of a step over its operators, as a drawing in a page, which may have several of them.

The drawing is as wide as the page, and its text is not stretched: the areas are one SVG without
text, whose x is the number of an operator; what has text lies over it, at shares of the width. A
script (memopt/show/script.py) adds zoom, and names the tensor under the pointer.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from memopt.memory.pieces import CATEGORIES, in_words
from memopt.memory.sizes import MB, as_text
from memopt.memory.trace import Phase, Trace
from memopt.show.axes import axis, axis_title, ticks

COLORS = dict(
    zip(
        CATEGORIES,
        ("#5f6b76", "#d98a29", "#7353ba", "#3b7dd8", "#c8467c", "#8ab17d"),
        strict=True,
    )
)

STYLE = """
.plot { margin: 1em 0; }
.frame { position: relative; height: 320px; margin: 22px 0 40px 62px; touch-action: pan-y;
  cursor: crosshair; outline-offset: 4px; }
.frame svg { position: absolute; inset: 0; width: 100%; height: 100%; }
.frame .marks { overflow: visible; pointer-events: none; }
.frame path, .frame line { vector-effect: non-scaling-stroke; }
.halo { paint-order: stroke; stroke: #fff; stroke-width: 4px; stroke-linejoin: round; }
.tip { position: absolute; z-index: 2; box-sizing: border-box; width: max-content;
  max-width: min(380px, calc(100vw - 16px)); padding: .5em .7em; background: #fffffff2;
  border: 1px solid #999; border-radius: 4px; font-size: 12px; pointer-events: none;
  overflow-wrap: anywhere; box-shadow: 0 1px 4px #0003; }
.tip[hidden] { display: none; } .tip i { display: block; margin-top: .4em; color: #666; }
.zoom { float: right; } .zoom button { font: 13px system-ui, sans-serif; min-width: 2.2em;
  height: 2em; margin-left: .2em; border: 1px solid #bbb; border-radius: 3px; background: #f6f6f6; }
.zoom button:disabled { color: #aaa; }
"""

_HEIGHT = 1000
"""The areas' y goes so far; SCRIPT knows it too."""
_ALONG = "operators of one training step"
_FITS = 2.5
"""A line that is so many times higher than the peak is told in words alone."""
_BUTTONS = (
    ("in", "+", "zoom in"),
    ("out", "&minus;", "zoom out"),
    ("left", "&lsaquo;", "to the left"),
    ("right", "&rsaquo;", "to the right"),
    ("all", "whole step", "the whole step"),
)


class Level(NamedTuple):
    """A number of bytes that is the same in all of the step: a budget, a device's memory."""

    name: str
    nbytes: int
    color: str
    dashes: str


def budget_level(nbytes: int) -> Level:
    return Level("budget", nbytes, "#c0392b", "6 4")


def device_levels(nbytes: int | None) -> list[Level]:
    """The memory of the device, where that is known."""
    return [] if nbytes is None else [Level("device", nbytes, "#111", "1 3")]


class Other(NamedTuple):
    """Another step, drawn as a line over the areas."""

    name: str
    trace: Trace


def timeline_of(
    trace: Trace,
    name: str = "",
    most: int = 0,
    levels: Sequence[Level] = (),
    other: Other | None = None,
) -> str:
    """Draw what is alive at each operator by category, with the peak.

    Args:
        name: what its ids begin with, where a page has several.
        most: what its axis goes to at least, so that several can be compared.
        levels: lines across. One far above the peak is told in words.
        other: the total of another step, each of its phases as wide as this step's.
    """
    most = max(1, trace.peak.total, most, 0 if other is None else other.trace.peak.total)
    drawn = [level for level in levels if level.nbytes <= _FITS * most]
    highest = 1.15 * max(most, *(level.nbytes for level in drawn), 1)

    def y(nbytes: float) -> float:
        return round(_HEIGHT * (1 - nbytes / highest), 2)

    sums = [sum(point[1:]) for point in trace.timeline]
    peak = sums.index(max(sums))
    data = {
        "at": f"{name}at",
        "points": trace.timeline,
        "operators": trace.operators,
        "instants": trace.instants,
        "phases": [(phase.name, phase.begin) for phase in trace.phases],
        "categories": [in_words(category) for category in CATEGORIES],
        "lives": list(map(_life_of, trace.lives)),
        "highest": highest,
        "peak": peak,
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # no tag among names
    buttons = "".join(
        f'<button type="button" data-do="{act}" title="{title}" aria-label="{title}">{sign}'
        "</button>"
        for act, sign, title in _BUTTONS
    )
    return (
        f'<div class="plot" id="{name}timeline"><div class="zoom">{buttons}</div>'
        f"<div>{_keys(trace, levels, drawn, other)}</div>"
        f'<div class="frame" tabindex="0">{_areas(trace, y, drawn, other)}'
        f"{_marks(trace, y, highest, trace.timeline[peak][0])}"
        f'<div class="tip" hidden></div></div><p id="{name}at"></p>'
        f'<script type="application/json" class="timeline">{text}</script></div>'
    )


def _life_of(life: Any) -> dict[str, Any]:
    """A life as the script reads it."""
    return {**vars(life), "category": CATEGORIES.index(life.category)}


def _keys(
    trace: Trace, levels: Sequence[Level], drawn: Sequence[Level], other: Other | None
) -> str:
    keys = [
        (f'<i style="background:{COLORS[c]}"></i>', in_words(c), trace.peak.by_category[c], "")
        for c in CATEGORIES
    ]
    if other is not None:
        keys.append((_stroke("#222", ""), other.name, other.trace.peak.total, ""))
    for level in levels:
        where = "" if level in drawn else ", above the drawing"
        keys.append((_stroke(level.color, level.dashes), level.name, level.nbytes, where))
    return "".join(
        f'<span class="key">{sign}{html.escape(text)} {as_text(nbytes)}{where}</span>'
        for sign, text, nbytes, where in keys
    )


def _stroke(color: str, dashes: str) -> str:
    return (
        '<svg class="stroke" width="22" height="8"><line x1="0" x2="22" y1="4" y2="4" '
        f'stroke="{color}" stroke-width="2" stroke-dasharray="{dashes}"/></svg>'
    )


def _areas(
    trace: Trace, y: Callable[[float], float], levels: Sequence[Level], other: Other | None
) -> str:
    instants = [point[0] for point in trace.timeline]
    last = trace.instants - 1
    below = [0] * len(instants)
    drawn = []
    for place, category in enumerate(CATEGORIES, 1):
        above = [b + point[place] for b, point in zip(below, trace.timeline, strict=True)]
        drawn.append(
            f'<path class="layer" fill="{COLORS[category]}" '
            f'd="{_area(instants, last, below, above, y)}"/>'
        )
        below = above
    if other is not None:
        path = _line(_stretched(other.trace, trace.phases), last, y)
        drawn.append(
            f'<path class="other" fill="none" stroke="#222" stroke-width="1.5" d="{path}"/>'
        )
    drawn += [
        f'<line class="level" x1="0" x2="{last}" y1="{y(level.nbytes)}" y2="{y(level.nbytes)}" '
        f'stroke="{level.color}" stroke-width="2" stroke-dasharray="{level.dashes}"/>'
        for level in levels
    ]
    return (
        f'<svg class="areas" viewBox="0 0 {max(1, last)} {_HEIGHT}" preserveAspectRatio="none" '
        f'role="img">{"".join(drawn)}<path class="under" fill="#fff6" stroke="#000" d=""/></svg>'
    )


def _marks(trace: Trace, y: Callable[[float], float], highest: float, peak: int) -> str:
    """Draw what has text: axes, phases, the peak."""

    def across(instant: int) -> str:
        return f"{round(100 * instant / max(1, trace.instants - 1), 3)}%"

    def up(nbytes: float) -> str:
        return f"{y(nbytes) / _HEIGHT:.2%}"

    marks = "".join(
        f'<line data-at="{phase.begin}" x1="{x}" x2="{x}" y1="0" y2="100%" stroke="#999" '
        f'stroke-dasharray="3 3"/><text class="phase" data-at="{phase.begin}" x="{x}" dx="4" '
        f'y="100%" dy="14" fill="#444">{html.escape(phase.name)}</text>'
        for phase in trace.phases
        if phase.name != "before"
        for x in [across(phase.begin)]
    )
    x, top = across(peak), up(trace.peak.total)
    anchor = "end" if peak > trace.instants / 2 else "start"
    lines = axis("left", ticks(0, highest / MB), lambda mb: up(mb * MB), "0", "100%")
    return (
        f'<svg class="marks">{lines}{marks}{axis_title("MB", "0", "-8", "end")}'
        f"{axis_title(_ALONG, '100%', '100%', 'end', down=30)}"
        '<line class="cursor" y1="0" y2="100%" stroke="#000" opacity="0"/>'
        f'<svg data-at="{peak}" x="{x}" y="{top}" overflow="visible"><rect class="peak-mark" '
        f'x="-3" y="-3" width="6" height="6"/></svg>'
        f'<text class="peak halo" data-at="{peak}" x="{x}" y="{top}" dy="-8" '
        f'text-anchor="{anchor}" font-weight="bold">peak {as_text(trace.peak.total)}</text></svg>'
    )


def _stretched(trace: Trace, onto: Sequence[Phase]) -> list[tuple[float, int]]:
    """The totals of a step, each of its phases as wide as that of another step; phases that the
    other step has not are left out.
    """
    wanted: dict[tuple[str, int], Phase] = _numbered(onto)
    found = []
    for key, phase in _numbered(trace.phases).items():
        if key not in wanted:
            continue
        begin, end = wanted[key].begin, wanted[key].end + 1
        share = (end - begin) / (phase.end + 1 - phase.begin)
        found += [
            (round(begin + (point[0] - phase.begin) * share, 2), sum(point[1:]))
            for point in trace.timeline
            if phase.begin <= point[0] <= phase.end
        ]
    return found


def _numbered(phases: Sequence[Phase]) -> dict[tuple[str, int], Phase]:
    """Each phase by its name, and by how many of that name came before it."""
    found: dict[tuple[str, int], Phase] = {}
    for phase in phases:
        number = sum(name == phase.name for name, _ in found)
        found[phase.name, number] = phase
    return found


def _line(points: Sequence[tuple[float, int]], last: int, y: Callable[[float], float]) -> str:
    if not points:
        return ""
    steps = "".join(f"H{x}V{y(value)}" for x, value in points)
    return f"M{points[0][0]} {y(points[0][1])}{steps}H{last}"


def _area(
    xs: Sequence[int],
    last: int,
    below: Sequence[int],
    above: Sequence[int],
    y: Callable[[float], float],
) -> str:
    """Between two lines of steps: what is there stays until the next point."""
    upper = "".join(f"H{x}V{y(value)}" for x, value in zip(xs, above, strict=True))
    lower = "".join(f"V{y(value)}H{x}" for x, value in reversed(list(zip(xs, below, strict=True))))
    return f"M{xs[0]} {y(above[0])}{upper}H{last}{lower}Z"
