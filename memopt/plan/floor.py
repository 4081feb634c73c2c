"""Why no plan fits: what is alive at the peak of the least one, and what would lower it."""

from __future__ import annotations

from memopt.anatomy.advice import advise
from memopt.anatomy.outcome import DependsOnValues
from memopt.anatomy.predict import predict
from memopt.anatomy.trace import trace_of
from memopt.anatomy.whatif import Fates
from memopt.plan.choose import BudgetTooSmall, Chosen
from memopt.plan.live import Live
from memopt.plan.size import as_text


def too_small(live: Live, least: Chosen, budget: int) -> BudgetTooSmall:
    """The error, with the floor.

    Args:
        least: the plan that needs least.
    """
    trace = trace_of(least.observed.ledger, 0.0)
    parts = sorted(trace.peak.by_category.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{as_text(nbytes)} of {name}" for name, nbytes in parts if nbytes)
    largest = trace.largest[0]
    where = f" of {largest.module}" if largest.module else ""
    text = (
        f"memopt.plan: budget must be at least {as_text(least.peak)}, the floor, got "
        f"{as_text(budget)}. The floor's peak is in {trace.peak.phase}, of {shares}; the largest "
        f"piece is {as_text(largest.nbytes)} of {largest.category}: "
        f"{'x'.join(map(str, largest.shape))} {largest.dtype}{where} ({largest.op})"
    )
    remedies = _remedies(live)
    if remedies:
        text += ". Beyond plans, as predicted with all blocks checkpointed: " + "; ".join(remedies)
    return BudgetTooSmall(text, least.peak)


def _remedies(live: Live) -> list[str]:
    fates = Fates(recipes=True, checkpoint="all")
    try:
        now, ledger = predict(live.step, fates, live.target)
    except (DependsOnValues, ValueError):
        return []
    found = advise(live.step, fates, live.target, now, ledger)
    return [f"{a.how} would lower it by {as_text(a.saved)}" for a in found[:3]]
