"""The tree of calls of one forward and backward, predicted where that can be, else real."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from memopt.memory.asked import has_values, home_of, target_of
from memopt.memory.attribution import tensors_of
from memopt.memory.calls.record import CallRecorder
from memopt.memory.calls.tree import CallTree
from memopt.memory.depth import Depth
from memopt.memory.ledger import Ledger
from memopt.memory.messages import noted_errors, quiet_libraries
from memopt.memory.parallel import is_sharded
from memopt.memory.predicted.predict import Changes, hollow_step
from memopt.memory.step import Step, StepFunction
from memopt.memory.unchanged import unchanged

_STEP_AND_MODEL = 2


def call_tree(
    step: Step, changes: Changes, depth: Depth | None = None, by_processor: bool = True
) -> CallTree:
    """The calls of a step without its optimizer, after `changes` to the model. All is as it was
    afterwards.

    A real step runs where a prediction does not come through and the model has values: where the
    step looks at them, or the model cannot be copied.

    Args:
        by_processor: count scratch whose size is the processor's choice.

    Raises:
        Whatever the step raises: its own error, with a note.
    """

    def look() -> CallTree:
        if not is_sharded(step.model):
            try:
                found = predicted_tree(step, changes, by_processor)
            except Exception:
                if not has_values(step.model, step.batch):
                    raise
            else:
                # A forward that was set on the model may call its modules, not the copy's.
                if len(found.calls) > _STEP_AND_MODEL or not has_values(step.model, step.batch):
                    return found
        with torch.enable_grad():
            return _real(step.alone(), changes, home_of(step.model), by_processor)

    with noted_errors(step.who, step.model), quiet_libraries():
        return (depth or Depth()).run(look, lambda tree: len(tree.calls))


def predicted_tree(step: Step, changes: Changes, by_processor: bool = True) -> CallTree:
    """The calls of a predicted step without its optimizer, after `changes` to a copy of the model.

    Args:
        by_processor: as in `call_tree`.

    Raises:
        Whatever keeps it from being predicted: DependsOnValues, or the step's own error.
    """
    recorders: list[CallRecorder] = []

    def watch(model: nn.Module, ledger: Ledger) -> CallRecorder:
        recorders.append(CallRecorder(model, ledger))
        return recorders[-1]

    target = target_of(step.who, step.model, None)
    with torch.enable_grad():
        hollow_step(step.alone(), changes, target, watch)
    return recorders[-1].tree(by_processor)


def _real(step: Step, changes: Changes, device: torch.device, by_processor: bool) -> CallTree:
    ledger = Ledger(step.model, device.type)
    recorder = CallRecorder(step.model, ledger)
    with unchanged(*step.roots):
        if changes is not None:
            changes(step.model)
        step.settle()
        step.adopt(ledger)
        ledger.restart()
        with ledger, recorder:
            step.run(ledger)
        ledger.close()
    return recorder.tree(by_processor)


def step_with(who: str, model: nn.Module, batch: Any, function: StepFunction = None) -> Step:
    """A forward and backward of a model whose loss is not known.

    Args:
        batch: None, where there is none, and nothing runs.
        function: runs forward and backward itself; `step=` of the function that the user called.
    """
    return Step(model, batch, None, sum_of_outputs, function=function, who=who)


def without_optimizer(step: Step) -> Step:
    """A step's forward and backward of the whole batch at once, whether it names a loss or not."""
    return replace(step, optimizer=None, loss=step.loss or sum_of_outputs, micro_batches=1)


def sum_of_outputs(output: Any) -> Tensor:
    """A loss for a model whose loss is not known: its output's `loss`, or the sum of all that has a
    gradient. Zero where nothing has one.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    found = [t for t in tensors_of(output) if t.requires_grad and _can_be_summed(t)]
    if not found:
        return torch.zeros((), requires_grad=True) * 1
    sums = [(t.abs() if t.is_complex() else t).sum().to(found[0].device) for t in found]
    return torch.stack([one.float() for one in sums]).sum()


def _can_be_summed(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested
