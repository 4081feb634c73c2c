"""The largest size with which a step fits into a budget of bytes, whatever says its peak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from memopt.memory.batches import part_of, rows_of
from memopt.memory.cuts import leaves_one
from memopt.memory.predicted.outcome import DependsOnValues
from memopt.memory.search import NEVER_FITS, TOO_SMALL, search
from memopt.memory.step import Step

PeakOf = Callable[[Step], int]
"""Bytes at the peak of a step, which is another one than the user's in its batch alone."""


def largest(step: Step, make: Callable[[int], Any], budget: int, limit: int, peak: PeakOf) -> int:
    """The largest size, from 0 to `limit`, with which the step on the batch `make(size)` fits.

    Sizes that the model refuses and that are below all that run count as fitting: a batch norm
    takes no single row, a convolution no sequence that is shorter than its kernel.

    Raises:
        Whatever the step raises with a size that is not one of these, or at all.
    """
    refused: dict[int, Exception] = {}
    ran: set[int] = set()

    def peak_of(size: int) -> int:
        try:
            found = peak(replace(step, batch=make(size), micro_batches=1))
        except Exception as error:
            if ran and size > min(ran):
                raise
            refused[size] = error
            if size > MOST_REFUSED:  # the model refuses the batch, whatever its size
                raise next(iter(refused.values())) from None
            return TOO_SMALL
        ran.add(size)
        return found

    size = search(peak_of, budget, (1, 16), limit)
    if refused and not ran:
        raise next(iter(refused.values()))
    return 0 if size in refused else size


MOST_REFUSED = 64


def largest_part(step: Step, budget: int, peak: PeakOf) -> int:
    """The most rows of the step's batch that fit in addition to the whole of it, while gradients
    of other parts are allocated: 0, if not even one row fits.
    """
    rows = rows_of(step.who, step.batch)
    if peak_with_part(step, rows, peak) <= budget:
        return rows
    # Between half of the rows and all there are two parts, as with half: no fewer, and larger ones.
    half = -(-rows // 2) if rows > 1 else 0
    return search_parts(lambda size: peak_with_part(step, size, peak), budget, (half,), half, rows)


def search_parts(
    peak: Callable[[int], int], budget: int, first: Sequence[int], limit: int, rows: int
) -> int:
    """`search` for the size of parts of so many rows. Two rows of an odd number leave a single one:
    where the model refuses that, larger parts may run all the same.
    """
    refused: set[int] = set()

    def peak_of(size: int) -> int:
        found = peak(size)
        if found < NEVER_FITS or not leaves_one(rows, size):
            return found
        refused.add(size)
        return TOO_SMALL

    size = search(peak_of, budget, first, limit)
    return 0 if size in refused else size


def peak_with_part(step: Step, size: int, peak: PeakOf) -> int:
    """The peak where so many rows of the step's batch run in addition to the whole of it."""
    rows = rows_of(step.who, step.batch)
    asked, rest = step_with_part(step, size)
    if size == rows:
        return peak(asked)
    try:
        found = rest + peak(asked)
        if leaves_one(rows, size):  # which the model has to take, too
            peak(replace(step, batch=part_of(step.batch, 1)[0], micro_batches=1))
        return found
    except DependsOnValues:
        raise
    except Exception:  # the model's own: it takes no other number of rows
        return NEVER_FITS


def step_with_part(step: Step, size: int) -> tuple[Step, int]:
    """The step with micro-batches of so many rows of its batch, and the bytes of the rest of it.
    One micro-batch more than the first shows what is there beside them: gradients of others.
    """
    rows = rows_of(step.who, step.batch)
    if size == rows:
        return replace(step, micro_batches=1), 0
    part, rest = part_of(step.batch, min(2 * size, rows))
    return replace(step, batch=part, micro_batches=2), rest
