"""A plan as one HTML page: inline SVG and tables, nothing from a network."""

from __future__ import annotations

import html

from memopt._plan.curve import Curve
from memopt._plan.drawing import curve_svg
from memopt._plan.planned import Planned
from memopt._plan.table import lines_of, sections_of, title_of
from memopt.memory.sizes import as_text
from memopt.memory.trace import Trace
from memopt.show.page import HasTables, document, table_of
from memopt.show.timeline import timeline_of


def page_of(plan: Planned, curve: Curve, anatomy: HasTables | None) -> str:
    """The step with the plan, the same without it, the table, and the curve of all budgets; and an
    anatomy of the step without the plan, if there is one.
    """
    title, *what = title_of(plan).split("\n")
    tables = "".join(map(table_of, sections_of(plan)))
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in lines_of(plan))
    return document(
        f"A plan: {title}",
        f'<p id="peak">{"<br>".join(map(html.escape, what))}</p>{_timelines(plan)}'
        f"{tables}{lines}<h2>What each budget costs</h2><p>The line: the best plan of each budget. "
        f'The points: this plan, and what one would do by hand.</p><div class="wide">'
        f"{curve_svg(plan, curve)}</div>{_of_step(anatomy)}",
    )


def _timelines(plan: Planned) -> str:
    """With the plan, and below it without, on one scale."""
    if plan.trace is None:
        return "<p>A plan that was loaded has no timeline.</p>"
    most = 0 if plan.plain_trace is None else plan.plain_trace.peak.total
    body = f"<h2>Bytes over the step with the plan</h2>{_beside(plan, plan.trace)}"
    body += timeline_of(plan.trace, "", most)
    if plan.plain_trace is not None:
        most = max(most, plan.trace.peak.total)
        plain = timeline_of(plan.plain_trace, "plain-", most)
        body += f"<h2>The same step without the plan</h2>{plain}"
    return body


def _beside(plan: Planned, trace: Trace) -> str:
    """What the drawing leaves out of the plan's peak, or has beyond it."""
    away = sum(block.away for block in plan.blocks)
    if away:
        said = (
            f"Drawn as if the {as_text(away)} that wait elsewhere stayed: without them the peak is"
        )
    elif plan.peak != trace.peak.total:
        said = (
            "Of this process, without what other ranks or DDP's buckets add: with them the peak is"
        )
    else:
        return ""
    return f"<p>{said} {as_text(plan.peak)}.</p>"


def _of_step(anatomy: HasTables | None) -> str:
    """The tables of the step without the plan."""
    if anatomy is None:
        return ""
    return f"<h2>More of the step without the plan</h2>{anatomy.html_tables()}"
