"""The peak of a step with the plans that need least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from memopt._plan.choices import CHUNKED, INSIDE, LEAST
from memopt._plan.live import Live
from memopt._plan.parts import NO_PARTS
from memopt._plan.terms import Terms
from memopt.applied import assign
from memopt.assignment import Assignment, Choice, Paths
from memopt.memory.asked import has_values
from memopt.memory.ledger import Ledger
from memopt.memory.parallel import bucket_bytes, used_map_bytes
from memopt.memory.pieces import OFFLOADED
from memopt.memory.predicted.outcome import DependsOnValues
from memopt.memory.predicted.predict import predict
from memopt.memory.step import Step
from memopt.memory.totals import highs_of
from memopt.memory.trace import trace_of
from memopt.whatif.fates import Fates, offloaded

_IN_CHUNKS = replace(LEAST, parts=(INSIDE, CHUNKED))


def least_peak(live: Live, step: Step, terms: Terms, plans: Sequence[Assignment]) -> int:
    """Bytes at the peak of a step of the live one's model with that of some plans which needs
    least, as predicted; where the step looks at values, of one that runs.

    Args:
        terms: whether and where the inputs of regions wait.

    Raises:
        DependsOnValues: it looks at values, and its batch has none.
    """
    return min(_peak(live, step, assignment, terms) for assignment in plans)


def least_plans(live: Live) -> list[Assignment]:
    """The plain least plan; and the same with the head and parts of blocks in chunks of rows, where
    that can be.
    """
    plain, choices = plain_least_plan(live), least_choices(live)
    in_chunks = Assignment(choices).without_regions(live.no_regions)
    return [plain] if in_chunks.choices == plain.choices else [plain, in_chunks]


def plain_least_plan(live: Live) -> Assignment:
    """All blocks checkpointed and recipes in them."""
    choices: dict[Paths, Choice] = {(path,): LEAST for path in live.blocks}
    return Assignment(choices).without_regions(live.no_regions)


def least_choices(live: Live) -> dict[Paths, Choice]:
    """Each block checkpointed with recipes, the head and parts in chunks where that can be."""
    parts = live.parts() if live.predictable else {}
    choices: dict[Paths, Choice] = {
        (path,): parts.get(path, NO_PARTS).of(_IN_CHUNKS) for path in live.blocks
    }
    return choices | {(path,): Choice(head=True) for path in live.heads()}


def _peak(live: Live, step: Step, assignment: Assignment, terms: Terms) -> int:
    put = partial(assign, assignment=assignment)
    runs = live.runs and has_values(step.model, step.batch)
    if live.predictable or not runs:
        try:
            hollow = predict(step, put, live.target, live.looks)
        except DependsOnValues:
            if not runs:
                raise
        else:
            ledger = hollow.ledger
            beside = bucket_bytes(live.entry) + used_map_bytes(live.entry)
            if terms.place is None:
                return max(highs_of(ledger)) + beside
            return _offloaded_peak(ledger, terms, step.who) + beside
    return replace(live, step=step, predictable=False).look(assignment).nbytes.peak


def _offloaded_peak(ledger: Ledger, terms: Terms, who: str) -> int:
    """The peak if the inputs of regions leave, and as many of them as may be are on their way back
    throughout.
    """
    away = Fates(checkpoint="all", offload=terms.place, who=who)
    log = offloaded(ledger, away)
    inputs = (entry.piece.nbytes for entry in log if entry.piece.fate == OFFLOADED)
    late = terms.copies_in_flight * max(inputs, default=0)
    return trace_of(ledger, 0.0, log).peak.total + late
