"""The bytes of each stage of a step, from a ledger.

A step is a chain of stages: what is before the blocks, each call of a block, what is behind them
(the head and the loss). Forward passes them in this order, backward in the opposite one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from memopt._offload.api import MIN_BYTES
from memopt._plan.watch import BlockCall, spans_of
from memopt.memory.ledger import Ledger
from memopt.memory.pieces import ACTIVATIONS, GRADIENTS, KEPT, REGION_INPUT, Piece
from memopt.memory.totals import Position, highs_of, totals_of


@dataclass(frozen=True)
class StageBytes:
    """The bytes of one stage, with the choice that it had."""

    resident: int
    """Held from its forward until its backward."""
    forward: int
    """The most in its forward, above what was held when that began."""
    backward: int
    """The most in its backward, above what the stages before it hold, without `gradients`."""
    gradients: int
    """Gradients of parameters that are there when its backward begins."""
    may_leave: tuple[int, ...] = ()
    """Sizes of the resident storages that offloading would take, in the order of saving."""

    def away(self, share: float) -> int:
        """The bytes that memopt.offload(fraction=share) takes: of those offered so far, never more
        than the share.
        """
        offered = taken = 0
        for nbytes in self.may_leave:
            offered += nbytes
            if taken + nbytes <= share * offered:
                taken += nbytes
        return taken


@dataclass(frozen=True)
class StepBytes:
    """The bytes of one step."""

    base: int
    """Bytes before the step: weights, optimizer states, the batch."""
    above: int
    """The most in forward and backward, above base."""
    optimizer: int
    """The most in the optimizer's step, above base."""
    stages: tuple[StageBytes, ...]
    """The stage before the blocks, the calls of blocks, the stage behind them."""
    peak: int
    in_order: bool
    """Whether backward passed the stages in the opposite order."""


def step_bytes(
    ledger: Ledger,
    begun: Position,
    called: Sequence[BlockCall[Position]],
    turned: Sequence[tuple[Position, Position]] = (),
) -> StepBytes:
    """Return the bytes of a closed ledger, of a step that offloads nothing.

    Args:
        begun: when forward began.
        called: the blocks' calls.
        turned: when each backward of a step's own function began and ended.
    """
    start = begun.log
    log = ledger.log
    totals, highs = totals_of(ledger), highs_of(ledger)
    gradients = [
        0,
        *accumulate(e.sign * e.piece.nbytes * (e.piece.category == GRADIENTS) for e in log),
    ]
    turn = ledger.marks[-1].place
    is_end = (p for p in range(turn, len(log)) if ledger.phases[log[p].instant] == "optimizer")
    end = next(is_end, len(log))
    spans = spans_of(called, begun, turned, lambda moment: moment.log, turn, end)
    last = ledger.saves
    saves = spans_of(called, begun, turned, lambda moment: moment.saves, last, last)
    stages = []
    for ((begin, stop), backward), (saved, _) in zip(spans, saves, strict=True):
        held = totals[begin]
        there = most = 0
        if backward is not None:
            there = gradients[backward[0]] - gradients[start]
            most = max(highs[backward[0] : backward[1] + 1]) - held - there
        stages.append(
            StageBytes(
                resident=totals[stop] - held,
                forward=max(highs[begin : stop + 1]) - held,
                backward=max(0, most),
                gradients=there,
                may_leave=_may_leave(ledger, *saved),
            )
        )
    begins = [call.backward.log for call in called if call.backward is not None]
    return StepBytes(
        base=totals[start],
        above=max(highs[start : end + 1]) - totals[start],
        # Less than before: the step released what it found.
        optimizer=max(0, max(highs[end:]) - totals[start]),
        stages=tuple(stages),
        peak=max(highs),
        in_order=begins == sorted(begins, reverse=True),
    )


def most_bytes(stages: Sequence[StageBytes]) -> StageBytes:
    """The most bytes of several looks at one stage."""
    return StageBytes(
        resident=max(stage.resident for stage in stages),
        forward=max(stage.forward for stage in stages),
        backward=max(stage.backward for stage in stages),
        gradients=max(stage.gradients for stage in stages),
        may_leave=max((stage.may_leave for stage in stages), key=sum),
    )


def joined_bytes(stages: Sequence[StageBytes]) -> StageBytes:
    """The bytes of consecutive stages as one."""
    before = [sum(s.resident for s in stages[:place]) for place in range(len(stages))]
    backward = [
        held + stage.backward + stage.gradients - stages[-1].gradients
        for held, stage in zip(before, stages, strict=True)
    ]
    return StageBytes(
        resident=sum(stage.resident for stage in stages),
        forward=max(held + s.forward for held, s in zip(before, stages, strict=True)),
        backward=max(0, *backward),
        gradients=stages[-1].gradients,
        may_leave=stages[0].may_leave,
    )


def _may_leave(ledger: Ledger, begin: int, stop: int) -> tuple[int, ...]:
    """The pieces that were saved first between two numbers of saves, and could be offloaded."""
    found: list[Piece] = []
    for piece in ledger.pieces:
        is_large = piece.nbytes >= MIN_BYTES and piece.category == ACTIVATIONS
        is_held = piece.fate in (KEPT, REGION_INPUT) and piece.phase == "forward"
        if is_large and is_held and piece.saved is not None and begin < piece.saved <= stop:
            found.append(piece)
    return tuple(p.nbytes for p in sorted(found, key=lambda p: p.saved or 0))
