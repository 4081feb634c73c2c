"""An anatomy as one HTML page: inline SVG and a few lines of script, nothing from a network."""

from __future__ import annotations

import html

from memopt._anatomy.findings import Findings
from memopt._anatomy.table import advice_of, by_depth, name_of, sections_of, title_of
from memopt.memory.pieces import CATEGORIES, in_words
from memopt.memory.sizes import as_text
from memopt.memory.trace import Trace
from memopt.show.page import document, table_of
from memopt.show.timeline import COLORS, timeline_of

_WIDTH, _MAP_HEIGHT = 1000, 260


def page_of(anatomy: Findings, *, formula: bool = False) -> str:
    """The page: what would help first, then the step.

    Args:
        formula: whether closed formulas stand beside what was predicted.
    """
    title, _, peak = title_of(anatomy).partition("\n")
    body = (
        f'<p id="peak">{html.escape(peak)}</p>{"".join(map(table_of, advice_of(anatomy)))}'
        f"<h2>Bytes over the step</h2>{timeline_of(anatomy.trace)}{tables_of(anatomy, formula)}"
    )
    return document(title, body)


def tables_of(anatomy: Findings, formula: bool = False) -> str:
    """What a page has below its timeline."""
    tables = "".join(map(table_of, sections_of(anatomy, formula)))
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in anatomy.notes)
    return f"<h2>Modules at the peak</h2>{_treemap(anatomy.trace)}{tables}{notes}"


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
            name = f"{name_of(path, trace)}: {in_words(category)}, {as_text(share)}"
            boxes.append(
                f'<rect x="{x:.2f}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}" '
                f'fill="{COLORS[category]}" stroke="#fff"><title>{html.escape(name)}</title></rect>'
            )
            top += height
        if width > 12:
            boxes.append(
                f'<text transform="translate({x + width / 2 + 4:.1f} {_MAP_HEIGHT - 6}) '
                f'rotate(-90)" fill="#fff">{html.escape(name_of(path, trace))}</text>'
            )
        x += width
    drawing = f'<svg id="modules" viewBox="0 0 {_WIDTH} {_MAP_HEIGHT}">{"".join(boxes)}</svg>'
    return f'<div class="wide">{drawing}</div>'
