"""Reports that print as tables, and show as tables in notebooks and by rich."""

from __future__ import annotations

import io
from typing import Any

from memopt.show.page import part_of_page
from memopt.show.sections import Tables, text_of


class Shown:
    """Base of reports that are read: `tables` says what they hold."""

    def tables(self) -> Tables:
        raise NotImplementedError

    def __str__(self) -> str:
        return text_of(self.tables())

    def _repr_html_(self) -> str:
        """Tables, as notebooks show them."""
        return part_of_page(self.tables())

    def __rich__(self) -> Any:
        """Tables of rich, for its `print`."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        report = self.tables()
        parts: list[Any] = [Text(report.title, style="bold")]
        for section in report.sections:
            table = Table(title=section.title or None)
            for name, is_number in zip(section.headings, section.is_number(), strict=True):
                table.add_column(name, justify="right" if is_number else "left")
            for number, row in enumerate(section.rows):
                style = "dim" if number in section.faint else None
                table.add_row(*map(Text, row), style=style)
            parts.append(table)
        return Group(*parts, *map(Text, report.lines))


def by_rich(report: Shown) -> str:
    """Return a report as rich writes it to a terminal.

    Raises:
        ImportError: rich is not installed.
    """
    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=True)
    with console.capture() as text:
        console.print(report)
    return text.get().rstrip("\n")
