"""Why no plan fits: what is alive at the peak of the least one, and what would lower it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from memopt._checkpoint.probe import left_out
from memopt._plan.choices import LEAST
from memopt._plan.choose import Chosen, solved
from memopt._plan.live import Live
from memopt._plan.profile import Profile
from memopt._plan.terms import Terms
from memopt.memory.messages import quiet_libraries
from memopt.memory.pieces import ACTIVATIONS, STATES, in_words
from memopt.memory.sizes import BudgetTooSmall, as_text, at_least
from memopt.memory.trace import Large, Trace, trace_of
from memopt.whatif.advice import advise
from memopt.whatif.fates import Fates, predicted_trace


def too_small(
    live: Live, profile: Profile, terms: Terms, least: Chosen, budget: int
) -> BudgetTooSmall:
    """The error, with the floor.

    Args:
        least: the plan that needs least.
    """
    trace = trace_of(least.observed.ledger, 0.0)
    phase, parts, pieces = _peak_of(least, trace)
    rest = least.peak - sum(parts.values())
    if least.assignment.offloads:  # the ledger is of a step that offloads nothing
        parts[ACTIVATIONS] = max(0, parts[ACTIVATIONS] + rest)
    elif rest > 0:
        parts["buckets of DistributedDataParallel, and what other ranks have more"] = rest
    largest_first = sorted(parts.items(), key=lambda item: -item[1])
    floor, got = at_least(least.peak, budget)
    lines = [
        f"plan: budget must be at least {floor}, the floor, got {got}",
        f"  the floor's peak is in {_PHASES.get(phase, phase)}:",
        *(f"    {as_text(nbytes)} of {in_words(name)}" for name, nbytes in largest_first if nbytes),
    ]
    if pieces:
        lines.append(f"  the largest piece is {_text_of(pieces[0])}")
    if live.no_regions:
        lines.append(f"  {left_out(live.no_regions)}")
    lines += _on_chunks(profile, terms, least)
    in_chunks = any(choice.chunks for choice in least.assignment.choices.values())
    remedies = _remedies(live, profile if in_chunks else None)
    if remedies:
        with_chunks = " and MLPs in chunks" if in_chunks else ""
        lines.append(f"  beyond plans, as predicted with all blocks checkpointed{with_chunks}:")
        lines += [f"    {remedy}" for remedy in remedies]
    return BudgetTooSmall("\n".join(lines), least.peak)


_PHASES = {"optimizer": "the optimizer's step"}


def _on_chunks(profile: Profile, terms: Terms, least: Chosen) -> Iterator[str]:
    """Say what runs in chunks of rows in the plan that needs least, and the floors without."""
    heads = least.assignment.heads
    parts = set(least.assignment.where(lambda choice: choice.chunks is not None))
    first = profile.uncorrected()
    for said, is_there, others in (
        (f"the head in chunks ({', '.join(heads)})", bool(heads), first.without_head()),
        (
            f"MLPs in chunks (in {len(parts)} of {len(profile.blocks)} blocks)",
            bool(parts),
            first.without_rows(),
        ),
    ):
        without = solved(others, 0, terms).peak if is_there else 0
        if without > least.peak:
            bound, _ = at_least(without, least.peak)  # rounded up, as the floor itself is
            yield f"  it has {said}: without, the floor is about {bound}"


def _peak_of(least: Chosen, trace: Trace) -> tuple[str, Counter[str], tuple[Large, ...]]:
    """The phase of the peak, the bytes of each category then, and the largest pieces."""
    observed = least.observed
    nbytes = observed.nbytes
    if not observed.is_watched:
        phase = trace.peak.phase
        if least.assignment.offloads and least.peak > nbytes.base + nbytes.optimizer:
            phase = "backward" if phase == "optimizer" else phase
        return phase, Counter(trace.peak.by_category), trace.largest
    parts = Counter(trace.peak.by_category)
    phase, pieces = trace.peak.phase, trace.largest
    if nbytes.optimizer > nbytes.above:
        # The optimizer did not step: what it takes is reckoned from its kind.
        phase, pieces = "optimizer", ()
        parts = Counter()
        for entry in observed.ledger.log:
            if entry.piece.phase == "before" and entry.sign > 0:
                parts[entry.piece.category] += entry.piece.nbytes
        parts["gradients and the optimizer's temporary buffers"] = nbytes.optimizer
    parts[STATES] += observed.states
    return phase, parts, pieces


def _text_of(piece: Large) -> str:
    where = f" of {piece.module}" if piece.module else ""
    shape = "x".join(map(str, piece.shape))
    what = f"{as_text(piece.nbytes)} of {in_words(piece.category)}"
    return f"{what}: {shape} {piece.dtype}{where} ({piece.op})"


def _remedies(live: Live, in_chunks: Profile | None) -> list[str]:
    """None where a step cannot be predicted: one that looks at values, of a sharded model, or whose
    blocks do not run with recipes in regions.
    """
    if not live.predictable:
        return []
    rows = {
        f"{path}.{part}".strip("."): parts.chunks
        for path, parts in (in_chunks.parts if in_chunks else {}).items()
        for part in parts.rows
    }
    fates = Fates(
        recipes=LEAST.recipes,
        checkpoint="all",
        chunks=max((count or 1 for count in rows.values()), default=None),
        rows=tuple(rows),
        who=live.step.who,
    )
    try:
        with quiet_libraries():  # what is said of other regions is not of this plan's
            now, ledger = predicted_trace(live.step, fates, live.target, live.looks)
    except Exception:  # the model's own, which must not hide what is to be said
        return []
    found = advise(live.step, fates, live.target, now, ledger, live.looks)
    return [f"{a.how} would lower it by {as_text(a.saved)}" for a in found[:3]]
