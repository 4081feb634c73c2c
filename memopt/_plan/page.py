"""A plan as one HTML page: inline SVG and tables, nothing from a network."""

from __future__ import annotations

from collections.abc import Iterator

from memopt._plan.curve import Curve
from memopt._plan.drawing import NARROW, curve_svg
from memopt._plan.planned import Planned
from memopt._plan.table import plan_tables
from memopt.memory.sizes import as_text
from memopt.memory.trace import Trace
from memopt.show.page import PartOfPage, heading, page_of, paragraphs
from memopt.show.sections import Section
from memopt.show.timeline import Other, budget_level, device_levels, timeline_of


def plan_page(
    plan: Planned, curve: Curve, anatomy: PartOfPage | None, capacity: int | None = None
) -> str:
    """The step with the plan, over the one without it; the table; the curve of all budgets; and an
    anatomy of the step without the plan, if there is one.

    Args:
        capacity: bytes of the device's memory, where that is known.
    """
    report = plan_tables(plan)
    return page_of(
        f"A plan: {report.title}",
        [
            *_timelines(plan, capacity),
            *report.sections,
            paragraphs(report.lines),
            heading("What each budget costs"),
            "<p>The line: the best plan of each budget. The points: this plan, and what one would "
            'do by hand.</p><div id="curve">'
            f'<div class="broad">{curve_svg(plan, curve)}</div>'
            f'<div class="narrow">{curve_svg(plan, curve, NARROW)}</div></div>',
            *_of_step(anatomy),
        ],
    )


def _timelines(plan: Planned, capacity: int | None) -> Iterator[str]:
    """The step with the plan, and below it without, on one scale."""
    if plan.trace is None:
        yield "<p>A plan that was loaded has no timeline.</p>"
        return
    traces = [trace for trace in (plan.trace, plan.plain_trace) if trace is not None]
    most = max(trace.peak.total for trace in traces)
    levels = [budget_level(int(plan.budget)), *device_levels(capacity)]
    plain = plan.plain_trace
    other = None if plain is None else Other("without the plan", plain)
    yield heading("Bytes over the step with the plan")
    yield _beside(plan, plan.trace)
    yield timeline_of(plan.trace, "", most, levels, other)
    if plain is not None:
        yield (
            "<p>The black line is the step without the plan; each of its phases is drawn as wide "
            "as with the plan, whose backward has more operators where it recomputes.</p>"
        )
        yield heading("The same step without the plan")
        yield timeline_of(plain, "plain-", most, levels)


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
