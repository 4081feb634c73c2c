"""The cuts of a number of rows into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator


def cuts(total: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yield where each part of so many rows begins and ends."""
    start = 0
    while start < total:
        end = start + rows_of_next(total - start, rows)
        yield start, end
        start = end


def rows_of_next(left: int, rows: int) -> int:
    """Return the rows of the next part: `rows`, or one fewer where a single row would be left for
    the last one, which a batch norm refuses.
    """
    return rows - 1 if left == rows + 1 > 3 else min(rows, left)


def leaves_one(total: int, rows: int) -> bool:
    """Whether the last of several parts of two rows or more is a single row nevertheless."""
    return rows == 2 and total % 2 == 1 and total > 1
