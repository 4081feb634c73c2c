"""Tables as text: by rich where it is installed, else plain."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Section(NamedTuple):
    """A table: a title, headings, and rows of cells."""

    title: str
    headings: Sequence[str]
    rows: list[list[str]]


def text_of(title: str, sections: Iterable[Section], lines: Sequence[str]) -> str:
    """A title, tables, and lines below them. Columns with headings in lower case are numbers."""
    try:
        from rich.console import Console
    except ImportError:
        return "\n\n".join([title, *map(_plain, sections), *lines])
    console = Console(
        file=io.StringIO(),
        force_terminal=sys.stdout.isatty(),
        width=None if sys.stdout.isatty() else 110,
    )
    with console.capture() as text:
        console.print(_rendered(title, sections, lines))
    return text.get().rstrip("\n")


def _rendered(title: str, sections: Iterable[Section], lines: Sequence[str]) -> Any:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = [Text(title, style="bold")]
    for section in sections:
        table = Table(
            title=section.title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1)
        )
        for place, heading in enumerate(section.headings):
            is_number = place and heading.islower()
            justify: Any = "right" if is_number else "left"
            table.add_column(heading, justify=justify, no_wrap=not place or heading == "How")
        for row in section.rows:
            table.add_row(*map(Text, row), style="bold" if row[0] == "total" else None)
        parts.append(table)
    return Group(*parts, *map(Text, lines))


def _plain(section: Section) -> str:
    rows = [list(section.headings), *section.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join([section.title, *lines])
