"""Looks at one step: what its stages hold, and how long they would take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from torch import nn

from memopt._checkpoint.row_stand_ins import Given, given_to_calls
from memopt._plan.bytes import StepBytes, step_bytes
from memopt._plan.own import again_in, check_runs_once
from memopt._plan.seconds import StageSeconds, estimated_seconds
from memopt._plan.watch import Watch, follows_of, kinds_of, sites_of
from memopt.applied import assign
from memopt.assignment import Assignment
from memopt.memory.batches import device_of
from memopt.memory.calls.record import CallRecorder
from memopt.memory.calls.tree import CallTree
from memopt.memory.ledger import Ledger
from memopt.memory.peak import of_optimizer
from memopt.memory.predicted.predict import Looks, hollow_step
from memopt.memory.speed import speed_of
from memopt.memory.step import Step, with_its_tensors
from memopt.memory.totals import Position, position_of
from memopt.memory.unchanged import Written, unchanged


@dataclass(frozen=True)
class Observed:
    """A step with an assignment."""

    nbytes: StepBytes
    seconds: list[StageSeconds]
    """Estimated."""
    paths: tuple[str, ...]
    """Paths of the blocks, in the order of their calls."""
    kinds: tuple[int, ...]
    """Kinds of the calls: see `kinds_of`. Calls of one kind take the same time."""
    sites: tuple[int, ...]
    """Sites of the calls: see `sites_of`. Calls of one site hold the same bytes."""
    ledger: Ledger
    follows: tuple[bool, ...] = ()
    """Whether each call gets what the one before it returned, and no operator runs between."""
    tree: CallTree | None = None
    """The calls of all modules, where it was asked for."""
    given: Mapping[str, Given] = field(default_factory=dict)
    """Then, what they get."""
    no_regions: tuple[str, ...] = ()
    """Blocks that are no regions, whatever the assignment says: see Live."""
    again: tuple[str, ...] = ()
    """Modules that the model's own checkpointing recomputes in backward."""
    is_watched: bool = False
    """Whether it is of a real forward and backward, and what the optimizer takes was reckoned."""
    states: int = 0
    """Then, of `nbytes.base`, the optimizer's states that are not there yet."""
    written: Written = field(default_factory=Written)
    """Everything that forward and backward write of what was there before."""


def predicted(
    step: Step,
    assignment: Assignment,
    blocks: Sequence[str],
    target: str,
    looks: Looks,
    with_tree: bool = False,
) -> Observed:
    """Look at a step that computes nothing. Nothing is offloaded.

    Args:
        looks: the others at this step.
        with_tree: whether the calls of all modules are recorded.

    Raises:
        DependsOnValues: it looks at values.
    """
    watches: list[Watch[Position]] = []
    recorders: list[CallRecorder] = []
    given: list[Mapping[str, Given]] = [{}]

    def watch(model: nn.Module, ledger: Ledger) -> AbstractContextManager[object]:
        stack = ExitStack()
        watches.append(stack.enter_context(Watch(model, blocks, lambda: position_of(ledger))))
        if with_tree:
            recorders.append(stack.enter_context(CallRecorder(model, ledger)))
            given.append(stack.enter_context(given_to_calls(model)))
        return stack

    put = partial(assign, assignment=assignment.staying())
    step = replace(step, watching=lambda: watches[-1].of_function())
    found = hollow_step(step, put, target, watch, looks)
    observed = _observed(found.ledger, watches[-1], step)
    tree = recorders[-1].tree() if recorders else None
    return replace(observed, written=found.written, tree=tree, given=given[-1])


def watched(step: Step, blocks: Sequence[str]) -> Observed:
    """Look at a real forward and backward of the model as it is, without the optimizer's step.

    All that it changes is put back.
    """
    alone = step.alone()
    with unchanged(*step.roots) as before:
        alone.settle()
        ledger, watch = with_its_tensors(step.model, lambda: _traced(step, alone, blocks))
    observed = _observed(ledger, watch, step)
    nbytes = observed.nbytes
    states, most = of_optimizer(step)
    return replace(
        observed,
        is_watched=True,
        states=states,
        written=before.written,
        nbytes=replace(
            nbytes,
            base=nbytes.base + states,
            optimizer=most,
            peak=nbytes.base + states + max(nbytes.above, most),
        ),
    )


def _traced(step: Step, alone: Step, blocks: Sequence[str]) -> tuple[Ledger, Watch[Position]]:
    """Run a forward and backward under a ledger.

    Args:
        alone: the step without its optimizer.
    """
    device = device_of(step.who, step.model, step.batch)
    ledger = Ledger(step.model, device.type)
    watch = Watch(step.model, blocks, lambda: position_of(ledger))
    step.adopt(ledger)
    ledger.restart()
    with ledger, watch:
        replace(alone, watching=watch.of_function).run(ledger)
    ledger.close()
    return ledger, watch


def _observed(ledger: Ledger, watch: Watch[Position], step: Step) -> Observed:
    check_runs_once(watch)
    if not watch.calls or watch.start is None:
        raise ValueError(
            "plan: blocks must be called in the model's forward with gradients enabled, "
            f"got {', '.join(watch.paths)}, which were not"
        )
    speed = speed_of(step, ledger.target)
    return Observed(
        step_bytes(ledger, watch.start, watch.calls, watch.turns),
        estimated_seconds(ledger, watch.start, watch.calls, speed, watch.turns),
        tuple(call.path for call in watch.calls),
        kinds_of(watch.calls),
        sites_of(watch.calls, ledger.ops),
        ledger,
        follows_of(watch.calls),
        again=again_in(watch),
    )
