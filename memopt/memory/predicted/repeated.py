"""A part of a step that every step repeats: its notes, taken from one ledger to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from memopt.memory.ledger import Ledger
from memopt.memory.pieces import Entry, Piece
from memopt.memory.totals import Position, position_of
from memopt.memory.work import Work


class Part(NamedTuple):
    """The notes of a part of a step that left no memory."""

    begin: Position
    ops: Sequence[str]
    phases: Sequence[str]
    nodes: Sequence[int]
    log: Sequence[Entry]
    scratch: Sequence[tuple[int, Piece]]
    work: Sequence[Work]


def part_since(begin: Position, ledger: Ledger) -> Part | None:
    """Return what was noted since then; None where memory that began then is there, or memory from
    before ended.
    """
    log = ledger.log[begin.log :]
    begun = {id(entry.piece) for entry in log if entry.sign > 0}
    if begun != {id(entry.piece) for entry in log if entry.sign < 0}:
        return None
    return Part(
        begin,
        ledger.ops[begin.operators :],
        ledger.phases[begin.operators :],
        ledger.nodes[begin.operators :],
        log,
        ledger.scratch[begin.scratch :],
        ledger.work[begin.work :],
    )


def repeat(part: Part, ledger: Ledger) -> None:
    """Note once more what another ledger noted, with pieces of this one's own."""
    begin = position_of(ledger)
    later, lines = begin.operators - part.begin.operators, begin.log - part.begin.log
    noted = (*(entry.piece for entry in part.log), *(piece for _, piece in part.scratch))
    pieces = {
        id(piece): replace(piece, born=piece.born + later, died=(piece.died or 0) + later)
        for piece in noted
    }
    ledger.pieces += [pieces[id(entry.piece)] for entry in part.log if entry.sign > 0]
    ledger.log += [Entry(e.instant + later, e.sign, pieces[id(e.piece)]) for e in part.log]
    ledger.scratch += [(place + lines, pieces[id(piece)]) for place, piece in part.scratch]
    ledger.ops += part.ops
    ledger.phases += part.phases
    ledger.nodes += part.nodes
    ledger.work += part.work
