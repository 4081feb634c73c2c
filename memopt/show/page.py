"""A report as one HTML page: inline SVG and a few lines of script, nothing from a network."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Protocol

from memopt.show.script import SCRIPT
from memopt.show.sections import Section, Tables
from memopt.show.timeline import STYLE

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #222; max-width: 1060px; margin: 2em auto;
  padding: 0 1em; background: #fff; }
h1 { font-size: 1.3em; } h2 { font-size: 1.05em; margin-top: 2em; }
h1, h2, p { overflow-wrap: anywhere; }
table { border-collapse: collapse; } td, th { padding: .2em .7em; text-align: left;
  border-bottom: 1px solid #e4e4e4; white-space: normal; vertical-align: top; }
td { font-variant-numeric: tabular-nums; } .number { text-align: right; white-space: nowrap; }
svg text { font: 11px system-ui, sans-serif; }
.key { display: inline-block; margin-right: 1.2em; }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
.key .stroke { margin-right: .4em; vertical-align: middle; }
p[id$="at"] { min-height: 1.5em; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
.map { position: relative; height: 260px; overflow: hidden; }
.map > * { position: absolute; box-shadow: inset 0 0 0 .5px #fff; }
.map > span { box-shadow: none; color: #fff; font-size: 11px; writing-mode: vertical-rl;
  text-align: end; top: 6px; bottom: 6px; overflow: hidden; white-space: nowrap;
  pointer-events: none;  transform: rotate(180deg); display: flex; align-items: center; }
.narrow { display: none; } .drawing { display: block; max-width: 100%; }
@media (max-width: 760px) {
  body { margin: 1em auto; padding: 0 .7em; } td, th { padding: .2em .35em; font-size: 12px; }
  .narrow { display: block; } .broad, .map > .thin { display: none; }
  .many tr { display: flex; flex-wrap: wrap; padding: .4em 0; border-bottom: 1px solid #e4e4e4; }
  .many tr:first-child { display: none; }
  .many td { border: 0; text-align: left; flex: 0 1 auto; overflow-wrap: anywhere; }
  .many td:empty { display: none; }
  .many td::before { content: attr(data-of) " "; color: #777; }
}
"""


_MOST_BESIDE = 3
"""A telephone shows so many columns side by side."""


class PartOfPage(Protocol):
    """A report that can be a part of another report's page."""

    def parts_of_page(self) -> Iterable[str | Section]:
        """The parts of its own page below the title."""


def page_of(title: str, parts: Iterable[str | Section]) -> str:
    """A whole page.

    Args:
        title: of one or more lines. Those behind the first are the paragraph "peak".
        parts: HTML, and tables.
    """
    first, *more = (html.escape(line) for line in title.split("\n"))
    body = "".join(part if isinstance(part, str) else _table(part) for part in parts)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{first}</title>'
        f"<style>{_STYLE}{STYLE}</style></head><body><h1>{first}</h1>"
        f'<p id="peak">{"<br>".join(more)}</p>{body}<script>{SCRIPT}</script></body></html>\n'
    )


def heading(text: str) -> str:
    """Above a part of a page."""
    return f"<h2>{html.escape(text)}</h2>"


def paragraphs(lines: Iterable[str]) -> str:
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def part_of_page(report: Tables) -> str:
    """A report as notebooks show it: its title, its tables and what stands below them."""
    first, *more = report.title.split("\n")
    tables = "".join(map(_table, report.urgent_first()))
    return f"<h3>{html.escape(first)}</h3>{paragraphs(more)}{tables}{paragraphs(report.lines)}"


def _table(section: Section) -> str:
    """Write a table with its title above. On narrow screens the cells of one with many columns
    flow, each behind its heading.
    """
    is_number = section.is_number()
    many = len(section.headings) > _MOST_BESIDE
    head = "".join(
        f"<th{_class(number)}>{html.escape(heading)}</th>"
        for heading, number in zip(section.headings, is_number, strict=True)
    )
    body = "".join(f"<tr>{_cells(section, row, is_number, many)}</tr>" for row in section.rows)
    title = heading(section.title) if section.title else ""
    kind = ' class="many"' if many else ""
    table = f"<table{kind}><tr>{head}</tr>{body}</table>"
    return f'{title}<div class="wide">{table}</div>'


def _cells(section: Section, row: Iterable[str], is_number: Iterable[bool], many: bool) -> str:
    cells = []
    for of, cell, number in zip(section.headings, row, is_number, strict=True):
        named = f' data-of="{html.escape(of)}"' if many else ""
        cells.append(f"<td{_class(number)}{named}>{html.escape(cell)}</td>")
    return "".join(cells)


def _class(is_number: bool) -> str:
    return ' class="number"' if is_number else ""
