"""Looks at one step: what its stages hold, and how long they would take."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import nn

from memopt.accumulate.undo import as_before
from memopt.anatomy.batches import device_of
from memopt.anatomy.hollow import CUDA_GRANULARITY
from memopt.anatomy.ledger import Ledger
from memopt.anatomy.predict import hollow_step
from memopt.anatomy.speed import speed_of
from memopt.anatomy.step import Step
from memopt.plan.bytes import StepBytes, step_bytes
from memopt.plan.choice import Assignment
from memopt.plan.seconds import StageSeconds, estimated_seconds
from memopt.plan.watch import Watch, converted


@dataclass(frozen=True)
class Observed:
    """A step with an assignment."""

    nbytes: StepBytes
    seconds: list[StageSeconds]
    """Estimated."""
    paths: tuple[str, ...]
    """Of the blocks, in the order of their calls."""
    kinds: tuple[int, ...]
    """Of the calls: equal numbers do the same."""
    ledger: Ledger


def predicted(step: Step, assignment: Assignment, blocks: Sequence[str], target: str) -> Observed:
    """Of a step that computes nothing.

    Raises:
        DependsOnValues: it looks at values.
    """
    watches: list[Watch[tuple[int, int]]] = []

    def watch(model: nn.Module, ledger: Ledger) -> Watch[tuple[int, int]]:
        watches.append(Watch(model, blocks, lambda: (len(ledger.log), len(ledger.work))))
        return watches[0]

    ledger, _ = hollow_step(step, assignment, target, watch)
    return _observed(ledger, watches[0], step)


def watched(step: Step, blocks: Sequence[str]) -> Observed:
    """Of a real forward and backward of the model as it is, without the optimizer's step.

    Gradients, buffers and random numbers are put back.
    """
    device = device_of("memopt.plan", step.model, step.batch)
    granularity = CUDA_GRANULARITY if device.type == "cuda" else 1
    ledger = Ledger(step.model, granularity, device.type)
    watch = Watch(step.model, blocks, lambda: (len(ledger.log), len(ledger.work)))
    alone = copy.copy(step)
    alone.optimizer, alone.set_to_none = None, True
    with as_before(step.model, device):
        step.adopt(ledger)
        ledger.restart()
        with ledger, watch:
            alone.run(ledger)
        ledger.close()
    return _observed(ledger, watch, step)


def _observed(ledger: Ledger, watch: Watch[tuple[int, int]], step: Step) -> Observed:
    if not watch.calls or watch.start is None:
        raise ValueError(
            "memopt.plan: blocks must be called in the model's forward, got "
            f"{', '.join(watch.paths)}, which were not"
        )
    in_log = converted(watch.calls, lambda stamp: stamp[0])
    in_work = converted(watch.calls, lambda stamp: stamp[1])
    numbers: dict[Hashable, int] = {}
    return Observed(
        step_bytes(ledger, watch.start[0], in_log),
        estimated_seconds(ledger, watch.start[1], in_work, speed_of(step)),
        tuple(call.path for call in watch.calls),
        tuple(numbers.setdefault(call.kind, len(numbers)) for call in watch.calls),
        ledger,
    )
