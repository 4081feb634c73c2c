"""The bytes of a step over its operators, as SVG; a page may have several of them."""

from __future__ import annotations

import html
import json
from collections.abc import Callable

from memopt.memory.pieces import CATEGORIES, in_words
from memopt.memory.sizes import MB, as_text
from memopt.memory.trace import Trace
from memopt.show.axes import axis, axis_title, ticks

COLORS = dict(
    zip(
        CATEGORIES,
        ("#5f6b76", "#d98a29", "#7353ba", "#3b7dd8", "#c8467c", "#8ab17d"),
        strict=True,
    )
)

_WIDTH, _HEIGHT, _LEFT, _TOP = 1000, 320, 70, 22
_ALONG = "operators of one training step, in their order"

SCRIPT = """
document.querySelectorAll("script.timeline").forEach(element => {
  const data = JSON.parse(element.textContent), svg = document.getElementById(data.id);
  const line = svg.querySelector(".cursor"), at = document.getElementById(data.at);
  function show(index) {
    const point = data.points[index], total = point.slice(1).reduce((a, b) => a + b, 0);
    const x = data.xs[index];
    line.setAttribute("x1", x); line.setAttribute("x2", x); line.setAttribute("opacity", 1);
    at.textContent = "operator " + point[0] + ": " + (total / 1e6).toFixed(1) + " MB = " +
      data.categories.map((name, i) => name + " " + (point[i + 1] / 1e6).toFixed(1)).join(" + ");
  }
  svg.addEventListener("mousemove", event => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * data.width;
    let best = 0;
    data.xs.forEach((value, i) => {
      if (Math.abs(value - x) < Math.abs(data.xs[best] - x)) best = i;
    });
    show(best);
  });
  show(data.peak);
});
document.body.dataset.ready = "yes";
"""


def timeline_of(trace: Trace, name: str = "", most: int = 0) -> str:
    """Draw what is alive at each operator by category, the peak, and a line that follows the mouse.

    Args:
        name: what its ids begin with, where a page has several.
        most: what its axis goes to at least, so that several can be compared.
    """
    xs = _xs(trace)
    sums = [sum(point[1:]) for point in trace.timeline]
    peak = sums.index(max(sums))
    data = {
        "id": f"{name}timeline",
        "at": f"{name}at",
        "points": trace.timeline,
        "xs": xs,
        "width": _WIDTH,
        "categories": [in_words(category) for category in CATEGORIES],
        "peak": peak,
        "total": trace.peak.total,
    }
    # In a script element only "</" could end the data.
    text = json.dumps(data).replace("</", "<\\/")
    keys = "".join(
        f'<span class="key"><i style="background:{COLORS[c]}"></i>{in_words(c)} '
        f"{as_text(trace.peak.by_category[c])}</span>"
        for c in CATEGORIES
    )
    return (
        f'<div>{keys}</div><div class="wide">{_svg(trace, xs, peak, name, most)}</div>'
        f'<p id="{name}at"></p>'
        f'<script type="application/json" class="timeline">{text}</script>'
    )


def _xs(trace: Trace) -> list[float]:
    return [_x(trace, point[0]) for point in trace.timeline]


def _x(trace: Trace, instant: int) -> float:
    return round(_LEFT + instant / max(1, trace.instants - 1) * (_WIDTH - _LEFT), 2)


def _svg(trace: Trace, xs: list[float], peak: int, name: str, most: int) -> str:
    highest = 1.15 * max(1, trace.peak.total, most)

    def y(nbytes: float) -> float:
        return round(_TOP + _HEIGHT - nbytes / highest * _HEIGHT, 2)

    below = [0] * len(xs)
    areas = []
    for place, category in enumerate(CATEGORIES, 1):
        above = [b + point[place] for b, point in zip(below, trace.timeline, strict=True)]
        areas.append(
            f'<path class="layer" fill="{COLORS[category]}" d="{_area(xs, below, above, y)}">'
            f"<title>{in_words(category)}</title></path>"
        )
        below = above
    bottom = _TOP + _HEIGHT
    marks = "".join(
        f'<line x1="{x}" x2="{x}" y1="{_TOP}" y2="{bottom}" stroke="#999" stroke-dasharray="3 3"/>'
        f'<text x="{x + 4}" y="{bottom + 14}" fill="#444">{html.escape(phase.name)}</text>'
        for phase in trace.phases
        if phase.name != "before"
        for x in [_x(trace, phase.begin)]
    )
    at, top = xs[peak], y(trace.peak.total)
    anchor = "end" if at > _WIDTH / 2 else "start"
    lines = axis("left", ticks(0, highest / MB), lambda mb: y(mb * MB), _LEFT, _WIDTH)
    return (
        f'<svg id="{name}timeline" viewBox="0 0 {_WIDTH} {bottom + 34}" role="img">{lines}'
        f"{''.join(areas)}{marks}{axis_title('MB', 4, 12, 'start')}"
        f"{axis_title(_ALONG, _WIDTH, bottom + 30, 'end')}"
        f'<line class="cursor" y1="{_TOP}" y2="{bottom}" stroke="#000" opacity="0"/>'
        f'<rect id="{name}peak-mark" x="{at - 3}" y="{top - 3}" width="6" height="6" fill="#000"/>'
        f'<text x="{at}" y="{top - 9}" text-anchor="{anchor}" font-weight="bold">peak '
        f"{as_text(trace.peak.total)}</text></svg>"
    )


def _area(xs: list[float], below: list[int], above: list[int], y: Callable[[float], float]) -> str:
    """Between two lines of steps: what is there stays until the next point."""
    upper = "".join(f"H{x}V{y(value)}" for x, value in zip(xs, above, strict=True))
    lower = "".join(f"V{y(value)}H{x}" for x, value in reversed(list(zip(xs, below, strict=True))))
    return f"M{xs[0]} {y(above[0])}{upper}H{_WIDTH}{lower}Z"
