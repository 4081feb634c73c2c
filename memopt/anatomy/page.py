"""An anatomy as one HTML page: inline SVG and a few lines of script, nothing from a network."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable

from memopt._sizes import as_text
from memopt.anatomy.figure import COLORS
from memopt.anatomy.findings import Findings
from memopt.anatomy.pieces import CATEGORIES
from memopt.anatomy.sections import Section
from memopt.anatomy.table import by_depth, sections_of, title_of
from memopt.anatomy.trace import Trace

_WIDTH, _HEIGHT = 1000, 320
_MAP_HEIGHT = 260

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #222; max-width: 1060px; margin: 2em auto;
  padding: 0 1em; background: #fff; }
h1 { font-size: 1.3em; } h2 { font-size: 1.05em; margin-top: 2em; }
table { border-collapse: collapse; } td, th { padding: .2em .7em; text-align: left;
  border-bottom: 1px solid #e4e4e4; } td { font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; display: block; } svg text { font: 11px system-ui, sans-serif; }
.key { display: inline-block; margin-right: 1.2em; } .key i { display: inline-block; width: .8em;
  height: .8em; margin-right: .4em; } #at { min-height: 1.5em; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
"""

_SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const svg = document.getElementById("timeline"), line = document.getElementById("cursor");
const at = document.getElementById("at");
function show(index) {
  const point = data.points[index], total = point.slice(1).reduce((a, b) => a + b, 0);
  const x = data.xs[index];
  line.setAttribute("x1", x); line.setAttribute("x2", x); line.setAttribute("opacity", 1);
  at.textContent = "operator " + point[0] + ": " + (total / 1e6).toFixed(1) + " MB = " +
    data.categories.map((name, i) => name + " " + (point[i + 1] / 1e6).toFixed(1)).join(", ");
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
document.body.dataset.ready = "yes";
"""


def page_of(anatomy: Findings, more: str = "") -> str:
    """The page; `more` is HTML that comes behind the timeline."""
    trace = anatomy.trace
    xs = _xs(trace)
    sums = [sum(point[1:]) for point in trace.timeline]
    peak_at = sums.index(max(sums))
    data = {
        "points": trace.timeline,
        "xs": xs,
        "width": _WIDTH,
        "categories": CATEGORIES,
        "peak": peak_at,
        "total": trace.peak.total,
    }
    # In a script element only "</" could end the data.
    text = json.dumps(data).replace("</", "<\\/")
    title, _, peak = title_of(anatomy).partition("\n")
    keys = "".join(
        f'<span class="key"><i style="background:{COLORS[c]}"></i>{c} '
        f"{as_text(trace.peak.by_category[c])}</span>"
        for c in CATEGORIES
    )
    tables = "".join(map(table_of, sections_of(anatomy)))
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in anatomy.notes)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>"
        f'<h1>{html.escape(title)}</h1><p id="peak">{html.escape(peak)}</p><div>{keys}</div>'
        f'<h2>Bytes over the step</h2>{_timeline(trace, xs, peak_at)}<p id="at"></p>{more}'
        f"<h2>Modules at the peak</h2>{_treemap(trace)}{tables}{notes}"
        f'<script type="application/json" id="data">{text}</script>'
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _xs(trace: Trace) -> list[float]:
    last = max(1, trace.instants - 1)
    return [round(point[0] / last * _WIDTH, 2) for point in trace.timeline]


def _timeline(trace: Trace, xs: list[float], peak: int) -> str:
    most = 1.15 * max(1, trace.peak.total)

    def y(nbytes: float) -> float:
        return round(_HEIGHT - nbytes / most * _HEIGHT, 2)

    below = [0] * len(xs)
    areas = []
    for place, category in enumerate(CATEGORIES, 1):
        above = [b + point[place] for b, point in zip(below, trace.timeline, strict=True)]
        areas.append(
            f'<path class="layer" fill="{COLORS[category]}" d="{_area(xs, below, above, y)}">'
            f"<title>{category}</title></path>"
        )
        below = above
    marks = "".join(
        f'<line x1="{x}" x2="{x}" y1="0" y2="{_HEIGHT}" stroke="#999" stroke-dasharray="3 3"/>'
        f'<text x="{x + 4}" y="12" fill="#444">{html.escape(phase.name)}</text>'
        for phase in trace.phases
        if phase.name != "before"
        for x in [round(phase.begin / max(1, trace.instants - 1) * _WIDTH, 2)]
    )
    at, top = xs[peak], y(trace.peak.total)
    anchor = "end" if at > _WIDTH / 2 else "start"
    return (
        f'<svg id="timeline" viewBox="0 0 {_WIDTH} {_HEIGHT + 4}" role="img">{"".join(areas)}'
        f'{marks}<line id="cursor" y1="0" y2="{_HEIGHT}" stroke="#000" opacity="0"/>'
        f'<circle id="peak-mark" cx="{at}" cy="{top}" r="4" fill="#000"/>'
        f'<text x="{at}" y="{top - 9}" text-anchor="{anchor}" font-weight="bold">peak '
        f"{as_text(trace.peak.total)}</text></svg>"
    )


def _area(xs: list[float], below: list[int], above: list[int], y: Callable[[float], float]) -> str:
    """Between two lines of steps: what is there stays until the next point."""
    upper = "".join(f"H{x}V{y(value)}" for x, value in zip(xs, above, strict=True))
    lower = "".join(f"V{y(value)}H{x}" for x, value in reversed(list(zip(xs, below, strict=True))))
    return f"M{xs[0]} {y(above[0])}{upper}H{_WIDTH}{lower}Z"


def _treemap(trace: Trace) -> str:
    """Modules as columns of a width, and their categories in them as heights."""
    modules = by_depth(trace.by_module, most=40)
    total = sum(sum(nbytes.values()) for nbytes in modules.values())
    boxes, x = [], 0.0
    for path, nbytes in modules.items():
        width, top = sum(nbytes.values()) / max(1, total) * _WIDTH, 0.0
        for category in CATEGORIES:
            share = nbytes.get(category, 0)
            if not share:
                continue
            height = share / sum(nbytes.values()) * _MAP_HEIGHT
            name = html.escape(f"{path or 'the model'}: {category}, {as_text(share)}")
            boxes.append(
                f'<rect x="{x:.2f}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}" '
                f'fill="{COLORS[category]}" stroke="#fff"><title>{name}</title></rect>'
            )
            top += height
        if width > 12:
            boxes.append(
                f'<text transform="translate({x + width / 2 + 4:.1f} {_MAP_HEIGHT - 6}) '
                f'rotate(-90)" fill="#fff">{html.escape(path or "the model")}</text>'
            )
        x += width
    return f'<svg id="modules" viewBox="0 0 {_WIDTH} {_MAP_HEIGHT}">{"".join(boxes)}</svg>'


def table_of(section: Section) -> str:
    head = _row("th", section.headings)
    body = "".join(_row("td", row) for row in section.rows)
    title = html.escape(section.title)
    return f'<h2>{title}</h2><div class="wide"><table>{head}{body}</table></div>'


def _row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
