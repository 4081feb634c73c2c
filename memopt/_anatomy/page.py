"""An anatomy as one HTML page: inline SVG and a few lines of script, nothing from a network."""

from __future__ import annotations

import html
from collections.abc import Iterator

from memopt._anatomy.findings import Findings
from memopt._anatomy.table import anatomy_tables, by_depth, module_name, step_sections
from memopt.memory.pieces import CATEGORIES, in_words
from memopt.memory.sizes import as_text
from memopt.memory.trace import Trace
from memopt.show.page import heading, page_of, paragraphs
from memopt.show.sections import Section
from memopt.show.timeline import COLORS, timeline_of

_WIDTH, _MAP_HEIGHT = 1000, 260


def anatomy_page(anatomy: Findings, formula: bool = False) -> str:
    """The page: what would help first, then the step."""
    report = anatomy_tables(anatomy, formula)
    urgent = [section for section in report.sections if section.is_urgent]
    timeline = heading("Bytes over the step"), timeline_of(anatomy.trace)
    return page_of(report.title, [*urgent, *timeline, *step_parts(anatomy, formula)])


def step_parts(anatomy: Findings, formula: bool = False) -> Iterator[str | Section]:
    """The parts of a page below its timeline."""
    yield heading("Modules at the peak")
    yield _treemap(anatomy.trace)
    yield from step_sections(anatomy, formula)
    yield paragraphs(anatomy.notes)


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
            name = f"{module_name(path, trace)}: {in_words(category)}, {as_text(share)}"
            boxes.append(
                f'<rect x="{x:.2f}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}" '
                f'fill="{COLORS[category]}" stroke="#fff"><title>{html.escape(name)}</title></rect>'
            )
            top += height
        if width > 12:
            boxes.append(
                f'<text transform="translate({x + width / 2 + 4:.1f} {_MAP_HEIGHT - 6}) '
                f'rotate(-90)" fill="#fff">{html.escape(module_name(path, trace))}</text>'
            )
        x += width
    drawing = f'<svg id="modules" viewBox="0 0 {_WIDTH} {_MAP_HEIGHT}">{"".join(boxes)}</svg>'
    return f'<div class="wide">{drawing}</div>'
