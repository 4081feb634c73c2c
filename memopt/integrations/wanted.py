"""The options of the trainers' integrations, and how they are put on the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memopt._arguments import as_path, check_flags
from memopt._checkpoint.other import says_that_it_checkpoints
from memopt._convert import convert, revert
from memopt._plan import Plan, plan, ranks
from memopt.memory.allocator import DeviceBytes
from memopt.memory.sizes import as_bytes
from memopt.memory.step import StepFunction
from memopt.place import Place, check_names_place

logger = logging.getLogger("memopt")


@dataclass(frozen=True)
class Wanted:
    """The options of the callbacks. `who` is the class or function that the user called.

    Raises:
        TypeError, ValueError: nothing is asked for, two things that exclude each other, or one that
            is none (a budget that is no size).
        OSError: there is no such plan, and no budget to make one for; or it cannot be saved there.
    """

    who: str
    budget: int | str | None = None
    """The budget of a whole step on each rank: a plan is made, and applied before the first one."""
    convert: bool = False
    """memopt.convert, without a plan."""
    checkpoint: bool = False
    """Whether `convert` makes regions of the blocks."""
    offload: Place | None = None
    """The place where activations may wait; with `convert` the inputs of regions."""
    plan: str | Path | None = None
    """A plan's file: read where it is, written where it is not and there is a budget."""
    measure: bool = True
    """Whether choices are timed on real steps before training begins; else they are estimated."""

    def __post_init__(self) -> None:
        plans = self.budget is not None or self.plan is not None
        if plans and (self.convert or self.checkpoint):
            raise ValueError(
                f"{self.who}: convert and checkpoint must not be given with a plan, which chooses "
                f"both, got convert={self.convert!r} and checkpoint={self.checkpoint!r}"
            )
        if not plans and not self.convert:
            raise ValueError(
                f"{self.who}: one of budget, plan and convert=True must be given, got none"
            )
        check_flags(
            self.who, convert=self.convert, checkpoint=self.checkpoint, measure=self.measure
        )
        if self.budget is not None:
            as_bytes(f"{self.who}: budget", self.budget)
        if self.offload is not None:
            check_names_place(f"{self.who}: offload", self.offload)
        if self.plan is not None:
            _check_file(self.who, self.plan, self.budget)


def _check_file(who: str, plan: object, budget: object) -> None:
    file = as_path(who, plan, "plan")
    if file.is_dir():
        raise IsADirectoryError(f"{who}: plan must be a file, got the directory {str(file)!r}")
    if budget is None and not file.exists():
        raise FileNotFoundError(
            f"{who}: plan must be a file that Plan.save wrote, where no budget is given to make "
            f"one for, got {str(file)!r}, which is not there"
        )
    if not file.parent.is_dir():
        raise FileNotFoundError(
            f"{who}: plan must be a file in a directory that exists, since the plan is saved "
            f"there, got {str(file)!r}"
        )


@dataclass
class Effect:
    """The changes that were made to a model: `undo` takes them back."""

    text: str
    """The text for people: the plan, or convert's report."""
    metrics: dict[str, int]
    """Bytes for loggers: "memopt/peak_bytes" of the step where it is known,
    "memopt/plain_peak_bytes" without memopt, "memopt/budget_bytes"; or "memopt/kept_bytes" for
    backward and "memopt/plain_kept_bytes"."""
    undo: Callable[[], object]
    notes: tuple[str, ...] = ()


def put_on(
    wanted: Wanted,
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None,
    autocast: torch.dtype | None = None,
    micro_batches: int = 1,
    step: StepFunction = None,
) -> Effect:
    """Convert or plan, on all ranks in the same way. A plan replaces the model's own gradient
    checkpointing; memopt.convert leaves it on, but in layers that it makes regions.

    Args:
        step: runs forward and backward itself, where the loss is not what the model returns.
    """
    if wanted.convert:
        report = convert(model, batch, checkpoint=wanted.checkpoint, offload=wanted.offload)
        kept = {"kept": report.bytes_after, "plain_kept": report.bytes_before}
        metrics = {f"memopt/{k}_bytes": int(v) for k, v in kept.items() if v is not None}
        return Effect(str(report), metrics, lambda: revert(model), report.notes)
    notes = _turn_own_off(wanted.who, model)
    file = None if wanted.plan is None else Path(wanted.plan)
    is_there = file is not None and bool(ranks.least(int(file.exists())))
    if file is not None and (is_there or wanted.budget is None):
        made = Plan.load(file).apply(model)
    else:
        made = plan(
            model,
            batch,
            wanted.budget,
            optimizer=optimizer,
            offload=wanted.offload,
            autocast=autocast,
            micro_batches=micro_batches,
            step=step,
            measure="auto" if wanted.measure else False,
        ).apply()
        if file is not None and ranks.is_first():
            made.save(file)
    peak = made.peak if made.measured_peak is None else made.measured_peak
    metrics = {
        "memopt/peak_bytes": peak,
        "memopt/plain_peak_bytes": made.plain_peak,
        "memopt/budget_bytes": made.budget,
    }
    return Effect(str(made), metrics, made.undo, notes)


def _turn_own_off(who: str, model: nn.Module) -> tuple[str, ...]:
    on = [m for m in model.modules() if says_that_it_checkpoints(m)]
    if not on:
        return ()
    outermost: Any = on[0]
    names = ("activation_checkpointing_disable", "gradient_checkpointing_disable")
    for name in (*names, "disable_gradient_checkpointing"):
        if hasattr(outermost, name):
            getattr(outermost, name)()
            break
    note = (
        f"{who}: the plan takes the place of the gradient checkpointing of "
        f"{type(outermost).__name__}, which is now off"
    )
    logger.warning(note)
    return (note,)


class Peak:
    """The allocator's peak since it was asked last; nothing where the device has no such count."""

    def __init__(self, device: torch.device) -> None:
        self._found = None if device.type == "cpu" else DeviceBytes(device)
        if self._found is not None:
            self._found.__enter__()

    def metrics(self) -> dict[str, int]:
        """Numbers for loggers: "memopt/allocated_peak_bytes"."""
        if self._found is None:
            return {}
        self._found.__exit__(None, None, None)
        most = self._found.most
        self._found.__enter__()
        return {"memopt/allocated_peak_bytes": most}


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors moved to a device."""
    return pytree.tree_map(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, batch)
