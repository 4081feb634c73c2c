"""A plan as one HTML page: inline SVG and tables, nothing from a network."""

from __future__ import annotations

from collections.abc import Iterator

from memopt._plan.curve import Curve
from memopt._plan.drawing import curve_svg
from memopt._plan.planned import Planned
from memopt._plan.table import plan_tables
from memopt.memory.sizes import as_text
from memopt.memory.trace import Trace
from memopt.show.page import PartOfPage, heading, page_of, paragraphs
from memopt.show.sections import Section
from memopt.show.timeline import timeline_of


def plan_page(plan: Planned, curve: Curve, anatomy: PartOfPage | None) -> str:
    """The step with the plan, without it, the table, and the curve of all budgets; and an anatomy
    of the step without the plan, if there is one.
    """
    report = plan_tables(plan)
    return page_of(
        f"A plan: {report.title}",
        [
            *_timelines(plan),
            *report.sections,
            paragraphs(report.lines),
            heading("What each budget costs"),
            "<p>The line: the best plan of each budget. The points: this plan, and what one would "
            f'do by hand.</p><div class="wide">{curve_svg(plan, curve)}</div>',
            *_of_step(anatomy),
        ],
    )


def _timelines(plan: Planned) -> Iterator[str]:
    """The step with the plan, and below it without, on one scale."""
    if plan.trace is None:
        yield "<p>A plan that was loaded has no timeline.</p>"
        return
    traces = [trace for trace in (plan.trace, plan.plain_trace) if trace is not None]
    most = max(trace.peak.total for trace in traces)
    yield heading("Bytes over the step with the plan")
    yield _beside(plan, plan.trace)
    yield timeline_of(plan.trace, "", most)
    if plan.plain_trace is not None:
        yield heading("The same step without the plan")
        yield timeline_of(plan.plain_trace, "plain-", most)


def _beside(plan: Planned, trace: Trace) -> str:
    """A note on what the drawing leaves out of the plan's peak, or has beyond it."""
    away = sum(block.away for block in plan.blocks)
    if away:
        said = (
            f"Drawn as if the {as_text(away)} that wait elsewhere stayed: without them the peak is"
        )
    elif plan.peak != trace.peak.total:
        said = (
            "Without what other ranks or DDP's buckets add to this process: with them the peak is"
        )
    else:
        return ""
    return f"<p>{said} {as_text(plan.peak)}.</p>"


def _of_step(anatomy: PartOfPage | None) -> Iterator[str | Section]:
    """The tables of the step without the plan."""
    if anatomy is not None:
        yield heading("More of the step without the plan")
        yield from anatomy.parts_of_page()
