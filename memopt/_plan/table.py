"""A plan as tables."""

from __future__ import annotations

from collections.abc import Iterator

from memopt._plan.planned import Planned, PlannedBlock
from memopt._plan.profile import AFTER, BEFORE, WITH_HEAD, behind_blocks
from memopt.memory.sizes import as_text
from memopt.show.sections import Section, Tables

# Where equal steps differ by such a factor, something else ran on the machine.
_MOST_SPREAD = 1.5


def plan_tables(plan: Planned) -> Tables:
    """The whole report. One row for each run of blocks that are treated alike."""
    rows = [_row(run) for run in _runs(plan.blocks)]
    blocks = Section("Blocks", ("Block", "Fate", "held", "elsewhere", "ms", "Why"), rows)
    return Tables(_title(plan), [blocks], list(_lines(plan)))


def _title(plan: Planned) -> str:
    peak = f"peak {as_text(plan.peak)} predicted"
    if plan.measured_peak is not None:
        peak += f", {as_text(plan.measured_peak)} measured"
    return (
        f"{plan.model} within {as_text(plan.budget)}\n"
        f"{peak}, in place of {as_text(plan.plain_peak)}\n"
        f"forward and backward {times_of(plan)}"
    )


def times_of(plan: Planned) -> str:
    """The times with the plan and without it. Measured ones have the range of equal steps."""
    spread = plan.profile.spread
    if not plan.is_timed or spread is None:
        timed = "measured once" if plan.is_timed else "estimated for a GPU"
        ours, plain = _ms(plan.seconds), _ms(plan.plain_seconds)
        return f"{ours} in place of {plain} ({plan.added:+.1%}, {timed})"
    least, most = spread
    ours, plain = (
        f"{_ms(seconds)} ({1e3 * least * seconds:,.4g} to {1e3 * most * seconds:,.4g})"
        for seconds in (plan.seconds, plan.plain_seconds)
    )
    if most > _MOST_SPREAD * least:
        said = f"samples of equal steps differ by {most / least:.1f}x, too much to tell"
    else:
        fast, slow = sorted((plan.seconds, plan.plain_seconds))
        said = f"{plan.added:+.1%}"
        if most * fast >= least * slow:
            said += ", which is less than samples of equal steps differ by"
    return f"{ours} in place of {plain}: {said} (measured: medians and, in brackets, ranges)"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.4g} ms"


def _lines(plan: Planned) -> Iterator[str]:
    profile = plan.profile
    # Below 0 where blocks that share a tensor count it twice, as the whole plan showed.
    ends = (BEFORE, behind_blocks(plan.assignment))
    outside = max(0, sum(profile.ends[name][0].resident for name in ends))
    yield (
        f"Besides: {as_text(profile.base)} before the step (weights, optimizer states, batch), "
        f"{as_text(outside)} held outside of the blocks, and in the optimizer's step "
        f"{as_text(profile.optimizer)} at most"
    )
    yield from _of_head(plan)
    yield from plan.notes


def _of_head(plan: Planned) -> Iterator[str]:
    """Say what the head in chunks gives."""
    if not plan.assignment.heads:
        return
    (whole, before), (chunked, now) = (plan.profile.ends[name] for name in (AFTER, WITH_HEAD))
    less = max(whole.forward, whole.backward) - max(chunked.forward, chunked.backward)
    seconds = now.forward + now.backward - before.forward - before.backward
    yield (
        f"In chunks of rows with the loss: {', '.join(plan.assignment.heads)} (no logits of the "
        f"whole batch; {as_text(less)} less at the peak of this part, {_time(seconds)})"
    )


def _time(more: float) -> str:
    return f"{1e3 * abs(more):,.3g} ms {'more' if more > 0 else 'less'}"


def _runs(blocks: tuple[PlannedBlock, ...]) -> Iterator[list[PlannedBlock]]:
    run: list[PlannedBlock] = []
    for block in blocks:
        if run and not _follows(run[-1], block):
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def _follows(block: PlannedBlock, other: PlannedBlock) -> bool:
    """Whether a row may say "first to last" of both: none that was not called lies between."""
    if _kind(block) != _kind(other):
        return False
    numbers = [one.path.rpartition(".")[2] for one in (block, other)]
    if not all(map(str.isdigit, numbers)):
        return True
    return int(numbers[1]) - int(numbers[0]) in (0, 1)  # 0: called again


def _kind(block: PlannedBlock) -> tuple[object, ...]:
    return (block.choice, len(block.together), block.path.rpartition(".")[0])


def _row(run: list[PlannedBlock]) -> list[str]:
    first, last = run[0].path, run[-1].path
    name = first if first == last else f"{first} to {last.rpartition('.')[2]}"
    away = sum(block.away for block in run)
    return [
        name,
        _fate(run[0]),
        as_text(sum(block.kept for block in run)),
        as_text(away) if away else "",
        f"{1e3 * sum(block.seconds for block in run):,.4g}",
        _why(run),
    ]


def _fate(block: PlannedBlock) -> str:
    shared = f", one region for {len(block.together)}" if block.together else ""
    return f"{block.choice}{shared}"


def _why(run: list[PlannedBlock]) -> str:
    saved, added = sum(block.saved for block in run), sum(block.added for block in run)
    if saved <= 0:
        return "it fits as it is"
    if added <= 0:
        return f"{as_text(saved)} less, and no slower"
    return f"{as_text(saved)} less for {1e3 * added:,.3g} ms"
