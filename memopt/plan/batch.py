"""How many rows fit, with the plan that needs least."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from memopt.memory.batches import part_of, resized, rows_of
from memopt.memory.ledger import highs_of
from memopt.memory.parallel import bucket_bytes
from memopt.memory.predicted.outcome import DependsOnValues
from memopt.memory.predicted.predict import hollow_step
from memopt.memory.search import NEVER_FITS, search
from memopt.plan.choice import Assignment, Choice
from memopt.plan.live import Live

_LEAST = Choice(recipes=True, checkpoint=True)


def largest_batch(live: Live, budget: int, limit: int) -> int:
    """The most rows, from 0 to `limit`, whose step is within the budget with all blocks
    checkpointed and recipes in them, as predicted: about five predictions.
    """
    make = resized(live.step.batch, 0, "Plan.largest_batch")
    return search(lambda rows: _peak(live, make(rows), 1), budget, (1, 2), limit)


def largest_micro_batch(live: Live, budget: int) -> int:
    """The same of a part of the batch, beside the whole of it, while the gradients of other parts
    are there: 0, if not even one row fits.
    """
    rows = rows_of("memopt.fit", live.step.batch)

    def peak(size: int) -> int:
        if size == rows:
            return _peak(live, live.step.batch, 1)
        part, whole = part_of(live.step.batch, min(2 * size, rows))
        try:
            return whole + _peak(live, part, 2)
        except DependsOnValues:
            raise
        except Exception:  # the model's own: it takes no other number of rows
            return NEVER_FITS

    return search(peak, budget, (rows, -(-rows // 2)), rows)


def _peak(live: Live, batch: Any, micro_batches: int) -> int:
    step = copy.copy(live.step)
    step.batch, step.micro_batches = batch, micro_batches
    assignment = Assignment(dict.fromkeys(live.blocks, _LEAST)).without_regions(live.no_regions)
    if live.predictable:
        try:
            hollow = live.depth.run(
                lambda: hollow_step(step, assignment, live.target, prime=live.primed),
                lambda hollow: len(hollow.ledger.ops),
            )
            return max(highs_of(hollow.ledger)) + bucket_bytes(live.entry)
        except DependsOnValues:
            if not live.runs:
                raise
    return replace(live, step=step, predictable=False).look(assignment).nbytes.peak
