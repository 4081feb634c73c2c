"""A step's memory, predicted."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memopt._progress import doing
from memopt.memory.depth import Depth
from memopt.memory.garbage import no_collection
from memopt.memory.known import Facts, with_facts
from memopt.memory.ledger import Ledger
from memopt.memory.modules import ByModule
from memopt.memory.optimizers import States
from memopt.memory.predicted.hollow import Copies, HollowLedger, hollow_copy
from memopt.memory.predicted.on_cuda import AsOnCuda, as_on_cuda, counts_on_host
from memopt.memory.predicted.outcome import DependsOnValues
from memopt.memory.predicted.repeated import Part
from memopt.memory.saved import let_go_of_graphs
from memopt.memory.step import Step, traced
from memopt.memory.unchanged import Before, Written, unchanged
from memopt.memory.writes import Exports

T = TypeVar("T")

MakeWatch = Callable[[nn.Module, Ledger], AbstractContextManager[Any]]


Changes = Callable[[nn.Module], object] | None
"""A function that changes a model in place before its step."""


class Hollow(NamedTuple):
    """A step that computed nothing."""

    ledger: Ledger
    seconds: float
    written: Written
    """Tensors from before the step that its forward and backward would write."""


@dataclass
class OfOptimizer:
    """Knowledge of an optimizer's steps, which are alike whatever the rest of a step does."""

    optimizer: torch.optim.Optimizer | None
    states: States | None = None
    """Set after a step: its states."""
    parts: dict[Hashable, Part] = field(default_factory=dict)
    """A ledger's notes of a step with states, by what has gradients."""


@dataclass
class Looks:
    """Knowledge of a step from earlier looks at it, by which the next ones need less."""

    depth: Depth = field(default_factory=Depth)
    optimizers: dict[int, OfOptimizer] = field(default_factory=dict)
    models: ByModule[Facts] = field(default_factory=ByModule)

    def facts(self, step: Step) -> AbstractContextManager[None]:
        """A context in which what is found of the step's model, or of a copy, is known from then
        on.
        """
        return with_facts(self.models.setdefault(step.model, {}))

    def of(self, step: Step) -> OfOptimizer:
        """Return what is known of its optimizer. Steps without one leave no state."""
        key, optimizer = id(step.optimizer), step.optimizer
        if key not in self.optimizers or self.optimizers[key].optimizer is not optimizer:
            none: States | None = {} if optimizer is None and step.set_to_none else None
            self.optimizers[key] = OfOptimizer(optimizer, none)
        return self.optimizers[key]


def predict(step: Step, changes: Changes, target: str, looks: Looks | None = None) -> Hollow:
    """A step that computes nothing, on copies, where it is deepest.

    Args:
        looks: the others at this step, or at one with other options or another batch.

    Raises:
        DependsOnValues: the step looks at values.
    """
    looks = looks or Looks()
    return looks.depth.run(
        lambda: hollow_step(step, changes, target, looks=looks),
        lambda hollow: len(hollow.ledger.ops),
    )


def hollow_step(
    step: Step,
    changes: Changes,
    target: str,
    watch: MakeWatch | None = None,
    looks: Looks | None = None,
) -> Hollow:
    """A step that computes nothing, on copies, after `changes` to the model's.

    Functions are not copied. What those close over that the step calls (a loss, hooks) may get
    tensors without values; it is put back.

    Args:
        watch: makes a context to run the step in, of the model's copy and the ledger. It is called
            again where the step has to run once more.
        looks: see `predict`.

    Raises:
        DependsOnValues: the step looks at values.
        ValueError: a parameter has no shape yet.
    """
    check_shapes(step)
    looks = looks or Looks()
    known = looks.of(step)
    is_first = known.states is None
    with looks.facts(step):
        found, new = _hollow_step(step, changes, target, watch, known)
        known.states = {**(known.states or {}), **new}
        if new and not is_first:  # it made states: next time they are there before it
            found, _ = _hollow_step(step, changes, target, watch, known)
    return found


def _hollow_step(
    step: Step, changes: Changes, target: str, watch: MakeWatch | None, known: OfOptimizer
) -> tuple[Hollow, States]:
    """The step, and the optimizer's states after it that were not known."""
    doing("predicting step")
    with unchanged(*step.roots, written=Written()) as before:  # the ledger tells what is written
        with before.watching():
            hollow, copies = _hollow(step, before)
            if changes is not None:
                changes(hollow.model)
        context: Any = step.context
        if target == "cuda":
            as_on_cuda(hollow.optimizer)
            context = AsOnCuda
        on_host = target == "cuda" and counts_on_host(hollow.optimizer)
        ledger = HollowLedger(hollow.model, target, copies, before, on_host, known.parts)
        hollow = replace(hollow, context=context)
        start = time.perf_counter()
        with (
            no_collection(),
            # Nothing is looked for in gradients that have no values.
            torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False),
            nullcontext() if watch is None else watch(hollow.model, ledger),
            Exports(ledger.exported),
        ):
            try:
                traced(hollow, ledger, known.states)
            except DependsOnValues as error:
                error.args = (f"{step.who}: {error}",)
                raise
            finally:
                let_go_of_graphs(hollow.model, step.model.modules())
        seconds = time.perf_counter() - start
        return Hollow(ledger, seconds, ledger.written), hollow.states(known.states or {})


def _hollow(step: Step, before: Before) -> tuple[Step, Copies]:
    found: list[Copies] = []

    def copy(objects: T, memo: dict[int, Any]) -> T:
        result, copies = hollow_copy(objects, before.computed(), memo)
        found.append(copies)
        return result

    return step.with_copies(copy), found[0]


def check_shapes(step: Step) -> None:
    """Refuses what `torch.nn.LazyLinear` and its like have before their first call."""
    named = (*step.trained, *step.model.named_buffers())
    for path, tensor in named:
        if is_lazy(tensor):
            raise ValueError(
                f"{step.who}: every parameter of the model must have its shape, got {path!r}, "
                "which takes it from the model's first call; call the model once"
            )
