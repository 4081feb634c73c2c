"""A report as one HTML page: inline SVG and a few lines of script, nothing from a network."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Protocol

from memopt.show.sections import Section, Tables
from memopt.show.timeline import SCRIPT

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
        f"<style>{STYLE}</style></head><body><h1>{first}</h1>"
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
    """Write a table with its title above."""
    is_number = section.is_number()
    head = _html_row("th", section.headings, is_number)
    body = "".join(_html_row("td", row, is_number) for row in section.rows)
    title = heading(section.title) if section.title else ""
    return f'{title}<div class="wide"><table>{head}{body}</table></div>'


def _html_row(tag: str, cells: Iterable[str], is_number: Iterable[bool]) -> str:
    classes = (' class="number"' if number else "" for number in is_number)
    made = (
        f"<{tag}{c}>{html.escape(cell)}</{tag}>" for cell, c in zip(cells, classes, strict=True)
    )
    return f"<tr>{''.join(made)}</tr>"
