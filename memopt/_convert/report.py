"""What convert did, to read and to process."""

from __future__ import annotations

import dataclasses
import html
import io
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from memopt._checkpoint.naming import joined
from memopt._convert.remaining import Remaining

# Of what is still saved, the text has so many shares, if they are as large in percent.
_MOST_SHARES = 8
_LEAST_SHARE = 3.0


class Swapped(NamedTuple):
    """A module that memopt computes now."""

    path: str
    """In the model, as named_modules() has it; empty for the model itself."""

    from_class: str
    """The name of its class, or of the function that an attribute held."""

    to: str
    """The module of memopt.nn or the function of memopt.functional that computes it."""


class Left(NamedTuple):
    """A module that stays as it was, although it looks like one that memopt knows, and why."""

    path: str
    from_class: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What convert did. `str()` is a table; in a terminal, if rich is installed, rich's."""

    model: str
    """The name of the model's class."""

    swapped: tuple[Swapped, ...]
    left: tuple[Left, ...]

    recipes: bool
    """Whether recipes are on in the calls of the model and of its modules."""

    checkpointed: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    """Paths of the modules whose forwards are checkpointed regions; those whose regions keep
    their inputs in host memory."""

    bytes_before: int | None = None
    bytes_after: int | None = None
    """Saved for backward by one forward of the sample input; None without one."""

    notes: tuple[str, ...] = ()

    remaining: tuple[Remaining, ...] = ()
    """With a sample input: what is still saved, by what saves it and in which modules, the most
    bytes first. Together they are `bytes_after`, to the byte."""

    idle: tuple[str, ...] = ()
    """Paths of swapped dropouts that drop nothing (p = 0). They are swapped in case p is set later,
    and are in `swapped`, but not in the counts and rows of the text."""

    def to_dict(self) -> dict[str, Any]:
        """The same as lists, dicts, strings, numbers and None, as JSON has them."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **fields,
            "swapped": [entry._asdict() for entry in self.swapped],
            "left": [entry._asdict() for entry in self.left],
            "checkpointed": list(self.checkpointed),
            "offloaded": list(self.offloaded),
            "notes": list(self.notes),
            "remaining": [
                {**entry._asdict(), "paths": list(entry.paths)} for entry in self.remaining
            ],
            "idle": list(self.idle),
        }

    def __str__(self) -> str:
        if sys.stdout.isatty():
            try:
                return self._as_rich_text()
            except ImportError:
                pass
        rows = [(f"{row.number} x", row.what, row.outcome, row.where) for row in self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
            for row in rows
        ]
        return "\n".join([self._title(), *table, *self._lines()])

    def _repr_html_(self) -> str:
        """A table, as notebooks show it."""
        head = ("", "module", "becomes, or why it is left", "where")
        rows = [(str(row.number), row.what, row.outcome, row.where) for row in self._rows()]
        body = "".join(_html_row("td", row) for row in rows)
        lines = "<br>".join(html.escape(line) for line in self._lines())
        return (
            f"<table><caption>{html.escape(self._title())}</caption>"
            f"{_html_row('th', head)}{body}</table><p>{lines}</p>"
        )

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table("", "module", "becomes, or why it is left", "where", title=self._title())
        for row in self._rows():
            style = None if row.swapped else "dim"
            cells = (str(row.number), row.what, row.outcome, row.where)
            table.add_row(*map(Text, cells), style=style)
        return Group(table, *map(Text, self._lines()))

    def _as_rich_text(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), force_terminal=True)
        with console.capture() as text:
            console.print(self)
        return text.get().rstrip("\n")

    def _title(self) -> str:
        swapped = len(self.swapped) - len(self.idle)
        return f"convert({self.model}): {swapped} swapped, {len(self.left)} left"

    def _rows(self) -> list[_Row]:
        """Entries that differ in their path alone, as one."""
        idle = set(self.idle)
        active = (e for e in self.swapped if e.path not in idle)
        swapped = _grouped(((e.from_class, e.to, e.path) for e in active), True)
        return swapped + _grouped(((e.from_class, e.reason, e.path) for e in self.left), False)

    def _lines(self) -> list[str]:
        lines = []
        if self.bytes_before is not None and self.bytes_after is not None:
            ratio = self.bytes_after / self.bytes_before if self.bytes_before else 1.0
            lines.append(
                f"saved for backward: {self.bytes_before:,} bytes before, {self.bytes_after:,} "
                f"after ({ratio:.2f}x)"
            )
        if self.checkpointed:
            lines.append(f"checkpointed: {joined(self.checkpointed)}")
        if self.offloaded:
            lines.append(f"checkpointed, inputs offloaded: {joined(self.offloaded)}")
        return [*lines, *self._remaining_lines(), *self.notes]

    def _remaining_lines(self) -> list[str]:
        """The largest shares of what is still saved."""
        if not self.remaining or not self.bytes_after:
            return []
        lines, rest = ["still saved:"], 100.0
        for entry in self.remaining[:_MOST_SHARES]:
            share = 100 * entry.nbytes / self.bytes_after
            if share < _LEAST_SHARE:
                break
            rest -= share
            where = f"{len(entry.paths)} x {entry.from_class} "
            where += f"({joined(path or 'the model' for path in entry.paths)})"
            help = f": {entry.help}" if entry.help else ""
            lines.append(f"  {share:4.1f} %  {entry.what}, {where}{help}")
        if rest >= 0.05:
            lines.append(f"  {rest:4.1f} %  the rest")
        if not self.checkpointed and not self.offloaded:
            lines.append("checkpoint=True keeps the inputs of the model's blocks in place of these")
        return lines


def _html_row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


class _Row(NamedTuple):
    number: int
    what: str
    outcome: str
    where: str
    swapped: bool


def _grouped(entries: Iterable[tuple[str, str, str]], swapped: bool) -> list[_Row]:
    groups: dict[tuple[str, str], list[str]] = {}
    for what, outcome, path in entries:
        groups.setdefault((what, outcome), []).append(path or "(the model)")
    return [
        _Row(len(paths), what, outcome, joined(paths), swapped)
        for (what, outcome), paths in groups.items()
    ]
