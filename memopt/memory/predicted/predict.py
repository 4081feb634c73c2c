"""A step's memory, predicted."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from memopt._progress import doing
from memopt.memory.depth import Depth
from memopt.memory.garbage import no_collection
from memopt.memory.ledger import Ledger
from memopt.memory.predicted.hollow import HollowLedger, hollow_copy
from memopt.memory.predicted.on_cuda import AsOnCuda, as_on_cuda, counts_on_host
from memopt.memory.step import Step, traced
from memopt.memory.unchanged import Written, unchanged
from memopt.memory.writes import Exports

MakeWatch = Callable[[nn.Module, Ledger], AbstractContextManager[Any]]


Changes = Callable[[nn.Module], object] | None
"""A function that changes a model in place before its step."""


class Hollow(NamedTuple):
    """A step that computed nothing."""

    ledger: Ledger
    seconds: float
    primed: frozenset[str]
    """The parameters for which the optimizer has a state then."""
    written: Written
    """Tensors from before the step that its forward and backward would write."""


@dataclass
class Looks:
    """Knowledge of a step from earlier looks at it, by which the next ones need less."""

    depth: Depth = field(default_factory=Depth)
    primed: frozenset[str] | None = None
    """The parameters for which the optimizer has a state after a step; None: not known yet."""


def predict(step: Step, changes: Changes, target: str, looks: Looks | None = None) -> Hollow:
    """A step that computes nothing, on copies, where it is deepest.

    Args:
        looks: the others at this step, or at one with other options or another batch.

    Raises:
        DependsOnValues: the step looks at values.
    """
    looks = looks or Looks()
    hollow = looks.depth.run(
        lambda: hollow_step(step, changes, target, prime=looks.primed),
        lambda hollow: len(hollow.ledger.ops),
    )
    looks.primed = hollow.primed
    return hollow


def hollow_step(
    step: Step,
    changes: Changes,
    target: str,
    watch: MakeWatch | None = None,
    prime: Collection[str] | None = None,
) -> Hollow:
    """A step that computes nothing, on copies, after `changes` to the model's.

    Functions are not copied. What those close over that the step calls (a loss, hooks) may get
    tensors without values; it is put back.

    Args:
        watch: makes a context to run the step in, of the model's copy and the ledger.
        prime: see `traced`.

    Raises:
        DependsOnValues: the step looks at values.
        ValueError: a parameter has no shape yet.
    """
    doing("predicting step")
    _check_shapes(step)
    with unchanged(*step.roots, written=Written()) as before:  # the ledger tells what is written
        with before.watching():
            (model, optimizer, batch), copies = hollow_copy(
                (step.model, step.optimizer, step.batch), before.computed()
            )
            if changes is not None:
                changes(model)
        context: Any = step.context
        if target == "cuda":
            as_on_cuda(optimizer)
            context = AsOnCuda
        on_host = target == "cuda" and counts_on_host(optimizer)
        ledger = HollowLedger(model, target, copies, before, on_host)
        hollow = copy.copy(step)
        hollow.model, hollow.optimizer, hollow.batch = model, optimizer, batch
        hollow.context = context
        start = time.perf_counter()
        with (
            no_collection(),
            nullcontext() if watch is None else watch(model, ledger),
            Exports(ledger.exported),
        ):
            traced(hollow, ledger, prime)
        seconds = time.perf_counter() - start
        return Hollow(ledger, seconds, hollow.primed(), ledger.written)


def _check_shapes(step: Step) -> None:
    """Refuses what `torch.nn.LazyLinear` and its like have before their first call."""
    named = (*step.model.named_parameters(), *step.model.named_buffers())
    for path, tensor in named:
        if is_lazy(tensor):
            raise ValueError(
                f"{step.who}: every parameter of the model must have its shape, got {path!r}, "
                "which takes it from the model's first call; call the model once"
            )
