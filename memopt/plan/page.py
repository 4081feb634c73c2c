"""A plan as one HTML page: inline SVG and tables, nothing from a network."""

from __future__ import annotations

import html

from memopt._sizes import as_text
from memopt.anatomy import page
from memopt.anatomy.findings import Findings
from memopt.anatomy.page import table_of
from memopt.plan.curve import Curve, Point
from memopt.plan.planned import Planned
from memopt.plan.table import lines_of, sections_of, title_of

_WIDTH, _HEIGHT, _MARGIN = 1000, 380, 60


def page_of(plan: Planned, curve: Curve, anatomy: Findings | None) -> str:
    """The table, and the curve of all budgets; as a part of an anatomy's page, if there is one."""
    title, _, what = title_of(plan).partition("\n")
    tables = "".join(map(table_of, sections_of(plan)))
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in lines_of(plan))
    body = f"{tables}{lines}<h2>What each budget costs</h2>{curve_svg(plan, curve)}"
    heading = html.escape(title)
    if anatomy is not None:
        return page.page_of(anatomy, f"<h2>A plan: {heading}</h2><p>{html.escape(what)}</p>{body}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{heading}</title><style>{page.STYLE}</style></head><body>"
        f'<h1>{heading}</h1><p id="peak">{html.escape(what)}</p>{body}</body></html>\n'
    )


def curve_svg(plan: Planned, curve: Curve) -> str:
    """Time against peak; the plan and the usual settings as points with names."""
    chosen = Point("this plan", plan.peak, plan.seconds)
    points = [*curve.plans, *curve.settings, chosen]
    left, right = min(p.peak for p in points), max(p.peak for p in points)
    low, high = min(p.seconds for p in points), max(p.seconds for p in points)

    def at(peak: float, seconds: float) -> tuple[float, float]:
        x = (peak - left) / max(1, right - left)
        y = (seconds - low) / max(1e-12, high - low)
        return (
            round(_MARGIN + x * (_WIDTH - 3 * _MARGIN), 1),
            round(_HEIGHT - _MARGIN - y * (_HEIGHT - 2 * _MARGIN), 1),
        )

    start, *rest = [at(point.peak, point.seconds) for point in curve.plans]
    path = f"M{start[0]} {start[1]}" + "".join(f"H{x}V{y}" for x, y in rest)
    marks = "".join(
        _mark(point, *at(point.peak, point.seconds), fill)
        for named, fill in ((curve.settings, "#5f6b76"), ([chosen], "#c8467c"))
        for point in named
    )
    axis = (
        f'<text x="{_MARGIN}" y="{_HEIGHT - 8}">{as_text(left)}</text>'
        f'<text x="{_WIDTH - 2 * _MARGIN}" y="{_HEIGHT - 8}" text-anchor="end">{as_text(right)} peak'
        f'</text><text x="4" y="{_HEIGHT - _MARGIN}">{1e3 * low:.4g} ms</text>'
        f'<text x="4" y="{_MARGIN - 24}">{1e3 * high:.4g} ms</text>'
    )
    return (
        f'<svg id="curve" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        f'<path d="{path}" fill="none" stroke="#3b7dd8" stroke-width="2"/>{marks}{axis}</svg>'
    )


def _mark(point: Point, x: float, y: float, fill: str) -> str:
    name = html.escape(point.name)
    return (
        f'<circle cx="{x}" cy="{y}" r="5" fill="{fill}"><title>{name}: {as_text(point.peak)}, '
        f'{1e3 * point.seconds:.4g} ms</title></circle><text x="{x + 8}" y="{y - 6}" '
        f'fill="{fill}">{name}</text>'
    )
