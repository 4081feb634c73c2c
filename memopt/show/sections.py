"""Tables, and how they are written as text, as wide as the terminal; where there is none, as wide
as COLUMNS or 110.

Text wraps, numbers never do. Where not all columns fit side by side, each row has several lines,
and so have the headings: those further right stand below, indented.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

_WIDTH = 110
_LEAST_WIDTH = 40
_ENOUGH, _WORD = 24, 40
"""A column of text that is as wide as this and as its longest word, up to so many characters, is
read easily: no column is made narrower to have others beside it."""
_SIZE = re.compile(r"[\d.,]+ M?B")
_GAP = "  "
_INDENT = "    "
_BREAKS = ".,(/=_-"
"""Behind these a word may be broken that is wider than its column."""


class Section(NamedTuple):
    """A table: a title, headings, and rows of cells."""

    title: str
    headings: Sequence[str]
    rows: list[list[str]]
    is_urgent: bool = False
    """Whether it is what a reader wants first: at the top of a page, at the end of a text, which is
    beside the prompt."""
    faint: Container[int] = ()
    """The numbers of rows that matter less."""

    def is_number(self) -> list[bool]:
        """Say of each column whether its heading begins in lower case, or all of it are sizes."""
        return [
            heading[:1].islower() or all(_SIZE.fullmatch(row[place]) for row in self.rows)
            for place, heading in enumerate(self.headings)
        ]


class Tables(NamedTuple):
    """A report: a title of one or more lines, tables, and lines below them."""

    title: str
    sections: Sequence[Section]
    lines: Sequence[str]

    def urgent_first(self) -> list[Section]:
        return sorted(self.sections, key=lambda section: not section.is_urgent)


def text_of(report: Tables) -> str:
    """Write a report as wide as the terminal, lines and cells wrapped."""
    width = max(_LEAST_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns)
    head = "\n".join(_bold(line) for line in _wrapped(report.title, width))
    ordered = sorted(report.sections, key=lambda section: section.is_urgent)
    tables = ["\n".join(_lines_of(section, width)) for section in ordered]
    below = "\n".join(part for line in report.lines for part in _wrapped(line, width))
    return "\n\n".join(part for part in (head, *tables, below) if part)


def list_of(report: Tables) -> str:
    """Write a report as wide as it is: a line for the title, for each row without headings, and for
    each line.
    """
    lines = [report.title]
    for section in report.sections:
        widths = [max(map(len, column)) for column in zip(*section.rows, strict=True)]
        for row in section.rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=False))
            lines.append(_GAP.join(cells).rstrip())
    return "\n".join([*lines, *report.lines])


def _lines_of(section: Section, width: int) -> Iterator[str]:
    columns = [list(column) for column in zip(section.headings, *section.rows, strict=True)]
    is_number = section.is_number()
    natural = [max(map(_width_of, column)) for column in columns]
    for place, column in enumerate(columns):
        if is_number[place]:  # the heading may wrap, the numbers may not
            natural[place] = max(map(_width_of, (*column[1:], *column[0].split())), default=0)
    least = list(natural)
    for place, column in enumerate(columns):
        if not is_number[place]:
            word = max((len(word) for cell in column for word in cell.split()), default=0)
            least[place] = min(natural[place], max(_ENOUGH, min(word, _WORD)))
    groups = _groups(least, width)
    widths = _widths(natural, least, groups, width)
    if section.title:
        yield _bold(section.title)
    for number, row in enumerate(zip(*columns, strict=True)):
        lines = []
        for line, group in enumerate(groups):
            cells = [_wrapped(row[place], widths[place]) for place in group]
            right = [is_number[place] for place in group]
            of_group = [widths[place] for place in group]
            if not line or any(row[place] for place in group):
                lines += [_INDENT * (line > 0) + t for t in _beside(cells, of_group, right)]
        if number == 0:
            yield from lines
            yield "-" * max(map(len, lines))
        else:
            yield from (_bold(line) if row[0] == "total" else line for line in lines)


def _width_of(cell: str) -> int:
    return max(map(len, cell.split("\n")))


def _groups(least: Sequence[int], width: int) -> list[list[int]]:
    """Columns that stand side by side."""
    groups: list[list[int]] = [[]]
    room = width
    for place, needed in enumerate(least):
        if groups[-1] and needed > room:
            groups.append([])
            room = width - len(_INDENT)
        groups[-1].append(place)
        room -= needed + len(_GAP)
    return groups


def _widths(
    natural: Sequence[int], least: Sequence[int], groups: list[list[int]], width: int
) -> list[int]:
    """Give what is left of a line to the columns that want more, in equal parts."""
    widths = list(least)
    for line, group in enumerate(groups):
        room = width - (len(_INDENT) if line else 0) - len(_GAP) * (len(group) - 1)
        room -= sum(least[place] for place in group)
        wanting = sorted((p for p in group if natural[p] > least[p]), key=lambda p: natural[p])
        for count, place in enumerate(wanting):
            more = min(natural[place] - least[place], max(0, room) // (len(wanting) - count))
            widths[place] += more
            room -= more
        if len(group) == 1:  # alone it may be wider than the line
            widths[group[0]] = min(widths[group[0]], width - (len(_INDENT) if line else 0))
    return widths


def _beside(
    cells: Sequence[Sequence[str]], widths: Sequence[int], right: Sequence[bool]
) -> Iterator[str]:
    for line in range(max(map(len, cells))):
        parts = []
        for cell, width, is_right in zip(cells, widths, right, strict=True):
            text = cell[line] if line < len(cell) else ""
            parts.append(text.rjust(width) if is_right else text.ljust(width))
        yield _GAP.join(parts).rstrip()


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most so many characters, broken at spaces, and a word that is wider at its signs.
    A line that is indented goes on so.
    """
    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        lines += [indent + part for part in _filled(line.split(), width - len(indent))]
    return lines


def _filled(words: Iterable[str], width: int) -> list[str]:
    lines = [""]
    for word in words:
        rest = word
        if lines[-1] and len(lines[-1]) + 1 + len(rest) <= width:
            lines[-1] += f" {rest}"
            continue
        if lines[-1]:
            lines.append("")
        while len(rest) > width:
            place = max((rest.rfind(sign, 0, width) for sign in _BREAKS), default=-1) + 1 or width
            lines[-1], rest = rest[:place], rest[place:]
            lines.append("")
        lines[-1] = rest
    return lines


def _bold(line: str) -> str:
    return f"\033[1m{line}\033[0m" if sys.stdout.isatty() else line
