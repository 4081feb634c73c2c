"""The bytes that are alive at each line of a ledger's log."""

from __future__ import annotations

from itertools import accumulate

from memopt.memory.ledger import Ledger


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
