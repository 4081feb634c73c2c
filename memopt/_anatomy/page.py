"""An anatomy as one HTML page: inline SVG and a few lines of script, nothing from a network."""

from __future__ import annotations

import html
from collections.abc import Iterator

from memopt._anatomy.findings import Findings
from memopt._anatomy.table import anatomy_tables, by_depth, module_name, step_sections
from memopt.memory.allocator import capacity_of
from memopt.memory.pieces import CATEGORIES, in_words
from memopt.memory.sizes import as_text
from memopt.memory.trace import Trace
from memopt.show.page import heading, page_of, paragraphs
from memopt.show.sections import Section
from memopt.show.timeline import COLORS, device_levels, timeline_of

_LEAST_NAMED = 1.5
"""Columns wider than this share of the page, in percent, have their module's name."""
_LEAST_NAMED_ON_TELEPHONES = 4


def anatomy_page(anatomy: Findings, formula: bool = False) -> str:
    """The page: what would help first, then the step."""
    report = anatomy_tables(anatomy, formula)
    urgent = [section for section in report.sections if section.is_urgent]
    levels = device_levels(capacity_of(anatomy.device))
    timeline = heading("Bytes over the step"), timeline_of(anatomy.trace, levels=levels)
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
    total = max(1, sum(sum(nbytes.values()) for nbytes in modules.values()))
    boxes, left = [], 0.0
    for path, nbytes in modules.items():
        whole = sum(nbytes.values())
        width, top = 100 * whole / total, 0.0
        across = f"left:{left:.3f}%;width:{width:.3f}%"
        for category in CATEGORIES:
            share = nbytes.get(category, 0)
            if not share:
                continue
            height = 100 * share / whole
            name = f"{module_name(path, trace)}: {in_words(category)}, {as_text(share)}"
            boxes.append(
                f'<div title="{html.escape(name)}" style="{across};top:{top:.3f}%;'
                f'height:{height:.3f}%;background:{COLORS[category]}"></div>'
            )
            top += height
        if width > _LEAST_NAMED:
            name = html.escape(module_name(path, trace))
            thin = ' class="thin"' if width < _LEAST_NAMED_ON_TELEPHONES else ""
            boxes.append(f'<span{thin} style="{across}">{name}</span>')
        left += width
    return f'<div class="map" id="modules">{"".join(boxes)}</div>'
