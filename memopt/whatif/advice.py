"""Advice: changes to a step that would help, each predicted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from memopt._checkpoint.blocks import find_blocks
from memopt._convert.head import find_heads
from memopt._extension import HAS_NATIVE
from memopt.memory.asked import is_host
from memopt.memory.batches import rows_to_cut
from memopt.memory.ledger import Ledger
from memopt.memory.messages import quiet_libraries
from memopt.memory.pieces import ACTIVATIONS, OFFLOADED, STATES, TEMPORARY, Entry, Piece
from memopt.memory.predicted.predict import Looks
from memopt.memory.speed import Speed, speed_of
from memopt.memory.step import Step
from memopt.memory.trace import Trace, trace_of
from memopt.whatif.fates import CHUNKS, Fates, predicted_trace

# A remedy that gives less than this share of the peak is not worth a line.
_LEAST = 0.005

_HEAD_IN_CHUNKS = "memopt.convert (a head in chunks), or functional.linear_cross_entropy"


@dataclass(frozen=True)
class Advice:
    """A change to the step, and what it would give."""

    what: str
    how: str
    """The call that makes it."""
    peak: int
    """Predicted, with it."""
    saved: int
    """Bytes of the peak that go."""
    slower: float
    """Share of the step's time lost, estimated from operations and bytes moved."""


class _Remedy(NamedTuple):
    what: str
    how: str
    predict: Callable[[], tuple[Trace, float]]
    """A function that gives its trace, and seconds that come on top of the trace's own work."""


def advise(
    step: Step, fates: Fates, target: str, now: Trace, ledger: Ledger, looks: Looks
) -> tuple[Advice, ...]:
    """Remedies by bytes of the peak saved per time lost, the best first.

    Args:
        now: the trace as it is, and its ledger; `looks`: what was found out with them.
    """
    speed = speed_of(step, target)
    before = _seconds(now, speed)
    found = []
    for remedy in _remedies(step, fates, target, now, ledger, looks):
        try:
            with quiet_libraries():  # what is to be said of the step itself was said
                trace, extra = remedy.predict()
        except Exception:  # not with this model, or without the native library
            continue
        saved = now.peak.total - trace.peak.total
        if saved > _LEAST * now.peak.total:
            slower = (_seconds(trace, speed) + extra - before) / before
            found.append(Advice(remedy.what, remedy.how, trace.peak.total, saved, slower))
    return tuple(sorted(found, key=lambda a: -a.saved / max(a.slower, 1e-3)))


def _remedies(
    step: Step, fates: Fates, target: str, now: Trace, ledger: Ledger, looks: Looks
) -> Iterator[_Remedy]:
    def with_fates(**changes: object) -> Callable[[], tuple[Trace, float]]:
        other = replace(fates, **changes)  # type: ignore[arg-type]
        return lambda: (predicted_trace(step, other, target, looks)[0], 0.0)

    def with_step(**changes: object) -> Callable[[], tuple[Trace, float]]:
        other = replace(step, **changes)  # type: ignore[arg-type]
        return lambda: (predicted_trace(other, fates, target, looks)[0], 0.0)

    if not step.set_to_none:
        yield _Remedy(
            "drop gradients between steps",
            "optimizer.zero_grad(set_to_none=True)",
            with_step(set_to_none=True),
        )
    if step.optimizer is not None and _is_foreach(step.optimizer, target):
        yield _Remedy(
            "an optimizer without temporary lists of all parameters",
            f"{type(step.optimizer).__name__}(..., fused=True)",
            with_step(optimizer=_one_by_one(step.optimizer)),
        )
    states = [p for p in ledger.pieces if p.category == STATES and p.dtype == torch.float32]
    if sum(piece.nbytes for piece in states) > _LEAST * now.peak.total:
        yield _Remedy(
            "optimizer states of 8 bits",
            "bitsandbytes.optim.AdamW8bit",
            lambda: (_as_if(now, ledger, _scaled(ledger, states, 4)), 0.0),
        )
    logits = list(_logits(step, ledger))
    if HAS_NATIVE and find_heads(step.model, ()):
        if not fates.recipes and not fates.head:
            yield _Remedy("the head in chunks of rows", _HEAD_IN_CHUNKS, with_fates(head=True))
    elif logits:
        yield _Remedy(
            "no logits of the whole batch at once",
            "functional.linear_cross_entropy",
            lambda: (_as_if(now, ledger, _scaled(ledger, logits, 0)), 0.0),
        )
    if fates.chunks is None:
        regions = "" if fates.checkpoint is None else "checkpoint=True, "
        yield _Remedy(
            "MLPs in chunks of rows",
            f"memopt.convert(model, batch, {regions}chunks={CHUNKS})",
            with_fates(recipes=True, chunks=CHUNKS),
        )
    if not fates.recipes:
        yield _Remedy(
            "recipes: norms and activations are recomputed",
            "memopt.convert(model)",
            with_fates(recipes=True),
        )
    if fates.checkpoint is None and find_blocks(step.model):
        yield _Remedy(
            "every second block as a region",
            "memopt.apply_activation_checkpointing(model, every=2)",
            with_fates(checkpoint=2),
        )
        yield _Remedy(
            "every block as a region",
            "memopt.apply_activation_checkpointing(model)",
            with_fates(checkpoint="all"),
        )
        yield _Remedy(
            "recipes inside regions",
            "memopt.convert(model, checkpoint=True)",
            with_fates(recipes=True, checkpoint="all"),
        )
    if HAS_NATIVE and not fates.offload and not is_host(step.model, target):
        yield _Remedy(
            "activations on the host",
            "with memopt.offload(): loss = ...",
            lambda: _offloading(step, replace(fates, offload="cpu"), target, looks),
        )
    rows = rows_to_cut(step.batch)
    if rows > step.micro_batches:
        yield _Remedy(
            "gradient accumulation",
            f"memopt.accumulate(model, batch, micro_batch={-(-rows // (2 * step.micro_batches))})",
            with_step(micro_batches=min(rows, 2 * step.micro_batches)),
        )


def _offloading(step: Step, fates: Fates, target: str, looks: Looks) -> tuple[Trace, float]:
    """The trace with offloading, and the seconds that copies add: they go one way at a time, and
    overlap the computation of forward, then of backward.
    """
    trace, _ = predicted_trace(step, fates, target, looks)
    speed = speed_of(step, target)
    copies = trace.fates.get(OFFLOADED, 0) / speed.link
    forward = _seconds(trace, speed, "forward")
    backward = _seconds(trace, speed, "backward")
    return trace, max(0.0, copies - forward) + max(0.0, copies - backward)


def _seconds(trace: Trace, speed: Speed, *phases: str) -> float:
    return sum(speed.seconds(row) for row in trace.work if not phases or row.phase in phases)


def _is_foreach(optimizer: torch.optim.Optimizer, target: str) -> bool:
    group = optimizer.param_groups[0]
    if "foreach" not in group or group.get("fused"):
        return False
    return bool(group["foreach"]) or (group["foreach"] is None and target == "cuda")


def _one_by_one(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return one whose step takes no temporary tensors: the fused kernels have none."""
    other = copy.copy(optimizer)
    other.param_groups = [
        {**group, "foreach": False, "fused": True} for group in other.param_groups
    ]
    return other


def _logits(step: Step, ledger: Ledger) -> Iterator[Piece]:
    """Find pieces that have a number for each token and each word."""
    config = getattr(step.model, "config", None)
    words = getattr(getattr(config, "text_config", config), "vocab_size", None)
    if not isinstance(words, int):
        return
    for piece in ledger.pieces:
        wide = len(piece.shape) >= 2 and piece.shape[-1] == words and piece.born
        if wide and piece.category in (ACTIVATIONS, TEMPORARY):
            yield piece


def _as_if(now: Trace, ledger: Ledger, entries: list[Entry]) -> Trace:
    return replace(trace_of(ledger, 0.0, entries), work=now.work)


def _scaled(ledger: Ledger, pieces: Sequence[Piece], divisor: int) -> list[Entry]:
    """The log if these pieces were smaller, or (0) were not there."""
    smaller = {
        id(piece): replace(piece, nbytes=piece.nbytes // divisor if divisor else 0)
        for piece in pieces
    }
    return [e._replace(piece=smaller.get(id(e.piece), e.piece)) for e in ledger.log]
