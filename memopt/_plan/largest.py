"""The largest size for which there is a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from memopt._plan import ranks
from memopt._plan.choose import least_chosen
from memopt._plan.least import least_peak, least_plans, plain_least_plan
from memopt._plan.live import Live
from memopt._plan.terms import Terms
from memopt.assignment import Assignment
from memopt.memory.batches import positions_of, resized
from memopt.memory.predicted.fits import MOST_REFUSED, largest
from memopt.memory.predicted.outcome import DependsOnValues
from memopt.memory.step import Step


class Larger(NamedTuple):
    """A size of a batch, which is tried."""

    size: int
    step: Step
    room: int
    """Bytes that the step may take."""


_MOST_SIZES = 8


def sizes_that_fit(
    live: Live,
    terms: Terms,
    largest_with: Callable[[Sequence[Assignment]], int],
    larger: Callable[[int], Larger | None],
) -> list[int]:
    """Return ever larger sizes for which some plan is found: the last one is the largest.

    What needs least at one size, where weights are most of it, need not do so at another. So a plan
    for the next size is looked for, until there is none.

    Args:
        largest_with: the largest size that fits with one of some plans; 0 if none does.
        larger: what comes behind a size, and runs; None: nothing.
    """
    sizes = [largest_with(least_plans(live))]
    # Steps that run may have no room; what inputs of regions take that wait elsewhere is not known.
    while live.predictable and terms.place is None and len(sizes) < _MOST_SIZES:
        asked = larger(sizes[-1])
        if asked is None:
            break
        there = live.at(asked.step)
        chosen = least_chosen(there.profile().uncorrected(), there.look, terms)
        if ranks.least(int(chosen.peak <= asked.room)) == 0:
            break
        sizes.append(max(asked.size, largest_with([chosen.assignment])))
    return sizes


def largest_size(live: Live, terms: Terms, dim: int, budget: int, limit: int, who: str) -> int:
    """The largest size in a dimension with which some plan of a live step stays within a budget, as
    predicted; from 0 to `limit`, or the size of a table of positions.
    """
    if dim:
        limit = min(limit, positions_of(live.step.model, limit))
    with (make := resized(live.step.batch, dim, who)):

        def largest_with(plans: Sequence[Assignment]) -> int:
            peak = partial(least_peak, live, terms=terms, plans=plans)
            return ranks.least(largest(live.step, make, budget, limit, peak))

        def larger(size: int) -> Larger | None:
            for more in range(size + 1, min(limit, size + MOST_REFUSED) + 1):
                step = replace(live.step, batch=make(more), micro_batches=1)
                if size or _runs(live, step):  # a batch norm takes no single row
                    return Larger(more, step, budget)
            return None

        return sizes_that_fit(live, terms, largest_with, larger)[-1]


def _runs(live: Live, step: Step) -> bool:
    try:
        least_peak(live, step, Terms(), [plain_least_plan(live)])
    except DependsOnValues:
        raise
    except Exception:  # the model's own
        return False
    return True
