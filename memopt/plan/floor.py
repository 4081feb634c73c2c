"""Why no plan fits: what is alive at the peak of the least one, and what would lower it."""

from __future__ import annotations

from memopt._sizes import as_text, at_least
from memopt.anatomy.advice import advise
from memopt.anatomy.outcome import DependsOnValues
from memopt.anatomy.pieces import in_words
from memopt.anatomy.predict import predict
from memopt.anatomy.trace import trace_of
from memopt.anatomy.whatif import Fates
from memopt.plan.choose import BudgetTooSmall, Chosen
from memopt.plan.live import Live


def too_small(live: Live, least: Chosen, budget: int) -> BudgetTooSmall:
    """The error, with the floor.

    Args:
        least: the plan that needs least.
    """
    trace = trace_of(least.observed.ledger, 0.0)
    parts = sorted(trace.peak.by_category.items(), key=lambda item: -item[1])
    largest = trace.largest[0]
    where = f" of {largest.module}" if largest.module else ""
    floor, got = at_least(least.peak, budget)
    lines = [
        f"memopt.plan: budget must be at least {floor}, the floor, got {got}",
        f"  the floor's peak is in {trace.peak.phase}:",
        *(f"    {as_text(nbytes)} of {in_words(name)}" for name, nbytes in parts if nbytes),
        f"  the largest piece is {as_text(largest.nbytes)} of {in_words(largest.category)}: "
        f"{'x'.join(map(str, largest.shape))} {largest.dtype}{where} ({largest.op})",
    ]
    remedies = _remedies(live)
    if remedies:
        lines.append("  beyond plans, as predicted with all blocks checkpointed:")
        lines += [f"    {remedy}" for remedy in remedies]
    return BudgetTooSmall("\n".join(lines), least.peak)


def _remedies(live: Live) -> list[str]:
    fates = Fates(recipes=True, checkpoint="all")
    try:
        now, ledger = predict(live.step, fates, live.target)
    except (DependsOnValues, ValueError):
        return []
    found = advise(live.step, fates, live.target, now, ledger)
    return [f"{a.how} would lower it by {as_text(a.saved)}" for a in found[:3]]
