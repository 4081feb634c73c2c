"""Positions in a ledger, and the bytes that are alive at each line of its log."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from memopt._compat import sequence_number
from memopt.memory.ledger import Ledger


class Position(NamedTuple):
    """How much a ledger has of each, and the number that autograd's next node will get."""

    log: int
    work: int
    saves: int
    operators: int
    scratch: int
    nodes: int


def position_of(ledger: Ledger) -> Position:
    return Position(
        log=len(ledger.log),
        work=len(ledger.work),
        saves=ledger.saves,
        operators=len(ledger.ops),
        scratch=len(ledger.scratch),
        nodes=sequence_number(),
    )


def totals_of(ledger: Ledger) -> list[int]:
    """Bytes alive before each line of a log, and at its end."""
    late = sum(piece.nbytes for piece in ledger.late)
    changes = (entry.sign * entry.piece.nbytes for entry in ledger.log)
    return list(accumulate(changes, initial=late))


def highs_of(ledger: Ledger, by_processor: bool = True) -> list[int]:
    """The totals of `totals_of`, each with the most scratch that was allocated then.

    Args:
        by_processor: count scratch whose size is the processor's choice.
    """
    totals = totals_of(ledger)
    highs = list(totals)
    for place, piece in ledger.scratch:
        nbytes = piece.nbytes if by_processor else piece.nbytes - piece.by_processor
        highs[place] = max(highs[place], totals[place] + nbytes)
    return highs


def margin_at(ledger: Ledger, place: int) -> int:
    """Bytes of a high of `highs_of` that may not be allocated: scratch that has only a bound."""
    here = [piece for at, piece in ledger.scratch if at == place]
    return max(here, key=lambda piece: piece.nbytes).margin if here else 0
