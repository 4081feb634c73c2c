"""Changes with which a step fits, each predicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memopt._checkpoint.blocks import find_blocks
from memopt._checkpoint.row_modules import predicted_row_modules
from memopt._convert.head import find_heads
from memopt._extension import HAS_NATIVE
from memopt._fits.report import Way
from memopt._plan import ranks
from memopt._plan.choices import LEAST
from memopt._plan.choose import least_chosen
from memopt._plan.least import least_choices
from memopt._plan.live import Live, blocks_of
from memopt._plan.terms import Terms
from memopt.assignment import Choice, Paths
from memopt.memory.asked import is_host
from memopt.memory.batches import rows_to_cut
from memopt.memory.ledger import Ledger
from memopt.memory.pieces import Entry
from memopt.memory.predicted.predict import Looks
from memopt.memory.step import Step
from memopt.memory.trace import Trace, trace_of
from memopt.whatif.fates import CHUNKS, Fates, offloaded, predicted_trace
from memopt.whatif.quantized import Bits, with_quantized_weights
from memopt.whatif.ranks import Parallel, log_of_rank

_MOST_RANKS = 1 << 14
_MOST_WAYS = 3
_MLPS, _HEAD = "MLPs", "the head"


@dataclass(frozen=True)
class Setting:
    """A step, and the devices that it runs on."""

    step: Step
    fates: Fates
    target: str
    ranks: int
    parallel: Parallel
    weight_bits: Bits | None
    known: dict[tuple[Fates, int], tuple[Trace, Ledger]] = field(default_factory=dict)
    """Predicted steps by their fates and micro-batches: devices change their logs alone."""
    looks: Looks = field(default_factory=Looks)

    def trace(self) -> Trace:
        """The memory of one rank, predicted."""
        key = self.fates, self.step.micro_batches
        if key not in self.known:
            self.known[key] = predicted_trace(self.step, self.fates, self.target, self.looks)
        trace, ledger = self.known[key]
        if self.ranks == 1 and self.weight_bits is None:
            return trace
        log: list[Entry] = offloaded(ledger, self.fates) if self.fates.offload else ledger.log
        model = self.step.model
        if self.weight_bits is not None:
            compute = self.step.autocast or next(model.parameters()).dtype
            log = with_quantized_weights(log, model, self.weight_bits, compute)
        return trace_of(ledger, 0.0, log_of_rank(log, ledger, model, self.ranks, self.parallel))

    def with_micro_batches(self, count: int) -> Setting:
        return replace(self, step=replace(self.step, micro_batches=count))


_Change = tuple[str, Setting]


def ways_of(setting: Setting, room: int, always: int) -> Iterator[Way]:
    """Changes that make it fit, at most three; where none does, the one that comes nearest.

    Args:
        room: bytes that the step may take.
        always: bytes that no fate of activations changes.
    """
    found = 0
    nearest: Way | None = None
    for group in _changes(setting, with_fates=always <= room):
        for how, changed in group:
            peak = _peak(changed)
            if peak is None:
                continue
            way = Way(how, peak, peak <= room)
            nearest = way if nearest is None or peak < nearest.peak else nearest
            if way.fits:
                yield way
                found += 1
                break
        if found == _MOST_WAYS:
            return
    if not found and nearest is not None:
        yield nearest


def _peak(setting: Setting) -> int | None:
    """None where such a step does not run, with this model, whose own error that may be."""
    try:
        return setting.trace().peak.total
    except Exception:
        return None


def _changes(setting: Setting, with_fates: bool) -> Iterator[Iterable[_Change]]:
    """Groups of changes, of each of which the first that is enough is wanted; from what costs least
    time to what costs most, more devices last.
    """
    calls = list(_calls(setting, with_fates))
    with_head = _head_is_whole(setting)
    for call, changed in calls if with_fates else ():
        parts = [_MLPS] * (changed.fates.chunks != setting.fates.chunks)
        parts += [_HEAD] * (with_head and changed.fates.recipes)
        yield [(f"{call}{_in_chunks(parts)}", changed)]
    call, best = calls[-1] if calls else ("", setting)
    if with_fates:  # chunks of few rows may take more than they spare
        known = [(peak, n) for n, (_, each) in enumerate(calls) if (peak := _peak(each))]
        call, best = calls[min(known)[1]] if known else (call, best)
        tried: list[Setting] = []
        yield _at_floor(setting, tried)
    name = f"{call}, " if call else ""
    moves = not (best.fates.offload or is_host(setting.step.model, setting.target))
    if with_fates and HAS_NATIVE and moves:
        away = replace(best, fates=replace(best.fates, offload="cpu"))
        yield [(f"{name}with activations offloaded", away)]
    if with_fates:
        yield _smaller(name, best)
        if tried:
            yield _smaller(f"{_plan_call(setting)}, ", tried[-1])
    if setting.parallel == "fsdp":
        yield _more_ranks(name, best)


def _calls(setting: Setting, with_chunks: bool) -> Iterator[_Change]:
    """Calls that change what becomes of activations; the last one as a rule needs least."""
    has_blocks = bool(find_blocks(setting.step.model))
    rows = _rows(setting) if with_chunks and setting.fates.chunks is None else ()
    chunks = {"recipes": True, "chunks": CHUNKS, "rows": rows}
    regions: dict[str, Any] = {"checkpoint": "all"}
    wanted: list[tuple[str, bool, dict[str, Any]]] = [
        ("memopt.convert(model)", True, {"recipes": True}),
        (f"memopt.convert(model, batch, chunks={CHUNKS})", bool(rows), chunks),
        ("memopt.apply_activation_checkpointing(model)", has_blocks, regions),
        ("memopt.convert(model, checkpoint=True)", has_blocks, {"recipes": True, **regions}),
    ]
    for call, is_there, options in wanted:
        fates = replace(setting.fates, **options)
        is_there = is_there and (HAS_NATIVE or not fates.recipes)
        if is_there and fates != setting.fates:
            yield call, replace(setting, fates=fates)


def _rows(setting: Setting) -> tuple[str, ...]:
    """The modules that `convert` has run in chunks of rows."""
    try:
        return predicted_row_modules(setting.step)
    except Exception:  # of a step without chunks, which says so itself
        return ()


def _head_is_whole(setting: Setting) -> bool:
    fates = setting.fates
    return not (fates.recipes or fates.head) and bool(find_heads(setting.step.model, ()))


def _in_chunks(parts: Sequence[str]) -> str:
    return f" ({' and '.join(parts)} in chunks)" if parts else ""


def _at_floor(setting: Setting, tried: list[Setting]) -> Iterator[_Change]:
    """Plans that need least, from what is found soonest. `tried` gets those that were asked for."""
    for planned in _planned(setting):
        tried.append(planned)
        yield f"{_plan_call(setting)}, at its floor{_planned_chunks(planned)}", planned


def _planned(setting: Setting) -> Iterator[Setting]:
    """The step with each block checkpointed, and with the plan that needs least; nothing where
    there is no plan.

    No module runs: the blocks that cannot be recomputed as they ran are not known here.
    """
    step, target = setting.step, setting.target
    fates = replace(
        setting.fates, recipes=LEAST.recipes, checkpoint="all", chunks=None, rows=(), planned=()
    )

    def with_choices(choices: Mapping[Paths, Choice]) -> Setting:
        return replace(setting, fates=replace(fates, planned=tuple(choices.items())))

    try:
        with ranks.alone():
            live = Live(step, blocks_of(step, None, target), target, steps=0, runs=False)
            choices = least_choices(live)
        yield with_choices(choices)
        if fates.offload is None:
            with ranks.alone():
                found = least_chosen(live.profile().uncorrected(), live.look, Terms())
            yield with_choices(found.assignment.choices)
    except Exception:  # a model without blocks, for one
        return


def _planned_chunks(planned: Setting) -> str:
    choices = [choice for _, choice in planned.fates.planned]
    parts = [_MLPS] * any(choice.chunks for choice in choices)
    return _in_chunks(parts + [_HEAD] * any(choice.head for choice in choices))


def _plan_call(setting: Setting) -> str:
    away = setting.fates.offload
    return f"memopt.plan(model, batch, budget{f', offload={away!r}' if away else ''})"


def _smaller(name: str, setting: Setting) -> Iterator[_Change]:
    rows = rows_to_cut(setting.step.batch)
    count = setting.step.micro_batches
    while count < rows:
        count = min(2 * count, rows)
        how = f"{name}memopt.accumulate(model, batch, micro_batch={-(-rows // count)})"
        yield how, setting.with_micro_batches(count)


def _more_ranks(name: str, setting: Setting) -> Iterator[_Change]:
    ranks = setting.ranks
    while ranks < _MOST_RANKS:
        ranks *= 2
        yield f"{name}FSDP2 over {ranks} ranks", replace(setting, ranks=ranks)
