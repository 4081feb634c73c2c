"""An anatomy as one HTML page: inline SVG and a few lines of script, nothing from a network."""

from __future__ import annotations

import html
from collections.abc import Iterable

from memopt.memory.sizes import as_text
from memopt.anatomy.figure import COLORS
from memopt.anatomy.findings import Findings
from memopt.memory.pieces import CATEGORIES, in_words
from memopt.show.sections import Section
from memopt.anatomy.table import advice_of, by_depth, name_of, sections_of, title_of
from memopt.show.timeline import SCRIPT, timeline_of
from memopt.memory.trace import Trace

_WIDTH, _MAP_HEIGHT = 1000, 260

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #222; max-width: 1060px; margin: 2em auto;
  padding: 0 1em; background: #fff; }
h1 { font-size: 1.3em; } h2 { font-size: 1.05em; margin-top: 2em; }
h1, h2, p { overflow-wrap: anywhere; }
table { border-collapse: collapse; } td, th { padding: .2em .7em; text-align: left;
  border-bottom: 1px solid #e4e4e4; white-space: normal; }
td { font-variant-numeric: tabular-nums; } .number { text-align: right; white-space: nowrap; }
svg { width: 100%; min-width: 640px; height: auto; display: block; }
svg text { font: 11px system-ui, sans-serif; }
.key { display: inline-block; margin-right: 1.2em; } .key i { display: inline-block; width: .8em;
  height: .8em; margin-right: .4em; } p[id$="at"] { min-height: 1.5em;
  font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
"""


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


def document(title: str, body: str) -> str:
    """A whole page."""
    title = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>{body}"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


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


def table_of(section: Section) -> str:
    """A table with its title above."""
    is_number = section.is_number()
    head = _row("th", section.headings, is_number)
    body = "".join(_row("td", row, is_number) for row in section.rows)
    title = html.escape(section.title)
    return f'<h2>{title}</h2><div class="wide"><table>{head}{body}</table></div>'


def fragment(title: str, sections: Iterable[Section], lines: Iterable[str]) -> str:
    """A report as notebooks show it: its title, its tables and what stands below them."""
    first, *more = title.split("\n")
    return (
        f"<h3>{html.escape(first)}</h3>"
        f"{''.join(f'<p>{html.escape(line)}</p>' for line in more)}"
        f"{''.join(map(table_of, sections))}"
        f"{''.join(f'<p>{html.escape(line)}</p>' for line in lines)}"
    )


def _row(tag: str, cells: Iterable[str], is_number: Iterable[bool]) -> str:
    classes = (' class="number"' if number else "" for number in is_number)
    made = (
        f"<{tag}{c}>{html.escape(cell)}</{tag}>" for cell, c in zip(cells, classes, strict=True)
    )
    return f"<tr>{''.join(made)}</tr>"
