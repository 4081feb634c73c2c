"""A report as one HTML page: inline SVG and a few lines of script, nothing from a network."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Protocol

from memopt.show.sections import Section
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


class HasTables(Protocol):
    """What can be a part of another report's page."""

    def html_tables(self) -> str:
        """Its tables, without its title."""


def document(title: str, body: str) -> str:
    """A whole page."""
    title = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>{body}"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


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
