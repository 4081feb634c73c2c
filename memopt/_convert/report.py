"""The report of convert, to read and to process."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from memopt._checkpoint.naming import joined
from memopt._convert.head import FoundHead
from memopt._convert.remaining import Remaining
from memopt.memory.sizes import as_text
from memopt.show.sections import Section, Tables, list_of
from memopt.show.shown import Shown, by_rich

# Of what is still saved, the text has so many shares, if they are as large in percent.
_MOST_SHARES = 8
_LEAST_SHARE = 3.0


class Swapped(NamedTuple):
    """A module that memopt computes now."""

    path: str
    """The path in the model, as named_modules() has it; empty for the model itself."""

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
class Report(Shown):
    """The report of convert. `str()` is a table; in a terminal, if rich is installed, rich's."""

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

    in_chunks: tuple[str, ...] = ()
    """Paths of the modules whose regions run in chunks of rows."""

    bytes_before: int | None = None
    bytes_after: int | None = None
    """Saved for backward by one forward of the sample input; None without one."""

    notes: tuple[str, ...] = ()

    by_function: tuple[Swapped, ...] = ()
    """Modules that stay as they are, and whose function is memopt's inside the calls of the model:
    batch, group and instance norms."""

    remaining: tuple[Remaining, ...] = ()
    """The rest that is still saved with a sample, by what saves it and in which modules, the most
    bytes first. Together they are `bytes_after`, to the byte."""

    idle: tuple[str, ...] = ()
    """Paths of swapped dropouts that drop nothing (p = 0). They are swapped in case p is set later,
    and are in `swapped`, but not in the counts and rows of the text."""

    heads: tuple[FoundHead, ...] = ()
    """The linears that return lazy logits, and what became of these in one forward of the
    sample."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as lists, dicts, strings, numbers and None, as JSON has them."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **fields,
            "swapped": [entry._asdict() for entry in self.swapped],
            "by_function": [entry._asdict() for entry in self.by_function],
            "left": [entry._asdict() for entry in self.left],
            "checkpointed": list(self.checkpointed),
            "offloaded": list(self.offloaded),
            "in_chunks": list(self.in_chunks),
            "notes": list(self.notes),
            "remaining": [
                {**entry._asdict(), "paths": list(entry.paths)} for entry in self.remaining
            ],
            "idle": list(self.idle),
            "heads": [entry._asdict() for entry in self.heads],
        }

    def __str__(self) -> str:
        if sys.stdout.isatty():
            with contextlib.suppress(ImportError):
                return by_rich(self)
        return list_of(self.tables())

    def tables(self) -> Tables:
        swapped = len(self.swapped) - len(self.idle)
        functions = f"{len(self.by_function)} by their functions, " if self.by_function else ""
        title = f"convert({self.model}): {swapped} swapped, {functions}{len(self.left)} left"
        rows = self._rows()
        headings = ("Number", "Module", "Becomes, or why it is left", "Where")
        faint = frozenset(number for number, row in enumerate(rows) if not row.swapped)
        cells = [[f"{row.number} x", row.what, row.outcome, row.where] for row in rows]
        return Tables(title, [Section("", headings, cells, faint=faint)], self._lines())

    def _rows(self) -> list[_Row]:
        """Entries that differ in their path alone, as one."""
        idle = set(self.idle)
        active = (e for e in self.swapped if e.path not in idle)
        swapped = _grouped(((e.from_class, e.to, e.path) for e in active), True)
        stay = ((e.from_class, f"its function is {e.to}", e.path) for e in self.by_function)
        swapped += _grouped(stay, True)
        return swapped + _grouped(((e.from_class, e.reason, e.path) for e in self.left), False)

    def _lines(self) -> list[str]:
        lines = []
        if self.bytes_before is not None and self.bytes_after is not None:
            ratio = self.bytes_after / self.bytes_before if self.bytes_before else 1.0
            before, after = as_text(self.bytes_before), as_text(self.bytes_after)
            lines.append(f"kept for backward: {before} before, {after} after ({ratio:.2f}x)")
        if self.checkpointed:
            lines.append(f"checkpointed: {joined(self.checkpointed)}")
        if self.offloaded:
            lines.append(f"checkpointed, inputs offloaded: {joined(self.offloaded)}")
        if self.in_chunks:
            lines.append(f"checkpointed, in chunks of rows: {joined(self.in_chunks)}")
        lines += [head.line() for head in self.heads]
        return [*lines, *self._remaining_lines(), *self.notes]

    def _remaining_lines(self) -> list[str]:
        """The largest shares of what is still saved."""
        if not self.remaining or not self.bytes_after:
            return []
        lines, rest = ["still kept:"], 100.0
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
