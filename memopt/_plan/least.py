"""The peak of a step with the plan that needs least."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from memopt._extension import HAS_NATIVE
from memopt._plan.live import Live
from memopt.applied import assign
from memopt.assignment import Assignment, Choice
from memopt.memory.ledger import highs_of
from memopt.memory.parallel import bucket_bytes
from memopt.memory.predicted.outcome import DependsOnValues
from memopt.memory.predicted.predict import hollow_step
from memopt.memory.step import Step

_LEAST = Choice(recipes=HAS_NATIVE, checkpoint=True)


def least_peak(live: Live, step: Step) -> int:
    """Bytes at the peak of a step of the live one's model with all blocks checkpointed and recipes
    in them, as predicted; where the step looks at values, of one that runs.
    """
    assignment = Assignment(dict.fromkeys(live.blocks, _LEAST)).without_regions(live.no_regions)
    put = partial(assign, assignment=assignment)
    if live.predictable:
        try:
            hollow = live.depth.run(
                lambda: hollow_step(step, put, live.target, prime=live.primed),
                lambda hollow: len(hollow.ledger.ops),
            )
            return max(highs_of(hollow.ledger)) + bucket_bytes(live.entry)
        except DependsOnValues:
            if not live.runs:
                raise
    return replace(live, step=step, predictable=False).look(assignment).nbytes.peak
