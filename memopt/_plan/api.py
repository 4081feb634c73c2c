"""`memopt.plan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, overload

import torch
from torch import nn

from memopt._arguments import check_count, check_flags
from memopt._class_patch import check_can_patch
from memopt._compat import is_compiled
from memopt._errors import in_the_name_of
from memopt._plan import ranks
from memopt._plan.compiled import CompiledPlan, compiled_plan
from memopt._plan.link import speeds_to
from memopt._plan.live import BlocksLike, Live, blocks_of
from memopt._plan.own import check_is_plain
from memopt._plan.plan import Plan, made
from memopt._plan.terms import Terms
from memopt._progress import progress
from memopt.memory.allocator import free_bytes
from memopt.memory.asked import (
    asked_step,
    check_measure,
    has_values,
    home_of,
    is_host,
    target_of,
)
from memopt.memory.optimizers import OptimizerLike
from memopt.memory.parallel import is_sharded, without_ddp
from memopt.memory.peak import bytes_here
from memopt.memory.sizes import Size, as_bytes, as_text
from memopt.memory.step import LossLike, Step, StepFunction
from memopt.place import Place, check_is_elsewhere, copies_in_flight, directory_of


@overload
def plan(
    model: nn.Module,
    batch: Any,
    budget: int | str | None = None,
    *,
    optimizer: OptimizerLike = torch.optim.AdamW,
    loss: LossLike = None,
    step: StepFunction = None,
    blocks: BlocksLike = None,
    offload: Place | None = None,
    host_budget: int | str | None = None,
    autocast: torch.dtype | None = None,
    micro_batches: int = 1,
    chunks: bool = True,
    measure: bool | Literal["auto"] = "auto",
    steps: int = 3,
    device: str | torch.device | None = None,
    compiled: Literal[False] = False,
) -> Plan: ...
@overload
def plan(
    model: nn.Module,
    batch: Any,
    budget: int | str | None = None,
    *,
    compiled: Literal[True],
    optimizer: OptimizerLike = torch.optim.AdamW,
    loss: LossLike = None,
    autocast: torch.dtype | None = None,
    micro_batches: int = 1,
    device: str | torch.device | None = None,
) -> CompiledPlan: ...
@in_the_name_of("plan", "assign", "convert", "checkpoint_wrapper")
@progress("memopt.plan")
def plan(
    model: nn.Module,
    batch: Any,
    budget: int | str | None = None,
    *,
    optimizer: OptimizerLike = torch.optim.AdamW,
    loss: LossLike = None,
    step: StepFunction = None,
    blocks: BlocksLike = None,
    offload: Place | None = None,
    host_budget: int | str | None = None,
    autocast: torch.dtype | None = None,
    micro_batches: int = 1,
    chunks: bool = True,
    measure: bool | Literal["auto"] = "auto",
    steps: int = 3,
    device: str | torch.device | None = None,
    compiled: bool = False,
) -> Plan | CompiledPlan:
    """Choose a fate for each block of a model, so that a training step's peak is within `budget`
    bytes and its time is the least possible.

        plan = memopt.plan(model, batch, "40GiB", optimizer=optimizer)
        print(plan)
        plan.apply()

    For each block it chooses whether to keep what autograd saves, to recompute norms, activations
    and dropouts from recipes (`convert`), to checkpoint the block (`checkpoint_wrapper`) or parts
    of it, to have one region of several blocks, or to run what works on each row alone (its MLP) in
    chunks of rows; and with `offload`, which share of the rest waits elsewhere. The head may run in
    chunks with its loss, so that there are no logits of the whole batch. All else stays as it is.
    The model does not change before `Plan.apply`.

    Bytes are those of predicted steps (see `memopt.anatomy`), which compute nothing; if a step
    cannot be predicted, those of a real one. Blocks of one class, with parameters and inputs of the
    same shapes, share the choices among them, so that one or a few steps show what each costs:
    a plain one, at most four for whole blocks and five for parts, however many blocks there are.
    Seconds are those of real steps on the model, with all that they change put back, or estimates
    for a GPU where the model has no values. The plan takes the least time within the budget at
    every instant of forward, backward and the optimizer's step, by dynamic programming over the
    blocks (csrc/plan). The whole plan is then predicted, and corrected until that is within the
    budget too.

    In a process group every rank must call it, and all take the same plan: for the least budget,
    and the most that any rank measures.

    Args:
        model: without regions, not converted and not compiled. On any device, also meta.
        batch: a mapping of keyword arguments, a tuple or list of positional ones, or the only one.
        budget: for all of the step's memory: weights, gradients and optimizer states too. Bytes, or
            a string: "40GiB" (2^30 bytes each), "24GB" (10^9). None: all that is free on the
            device, and what the model takes of it.
        optimizer: one of the model's, or a class or function that makes one of parameters, or None.
            What it trains beside the model (a loss's weights) counts too; a class gets the
            parameters of the model, and those of a `loss` that is a module.
        loss: makes the loss of what the model returns. Default: the output's `loss`, its first
            element or the output.
        step: `step(model, batch)` runs forward and backward of a micro-batch itself, in place of
            the model's call, the loss and backward: several backwards, gradient penalties, the two
            losses of a GAN, models in an nn.ModuleList. It uses the model and the batch that it is
            given: predictions give it copies. The optimizer steps behind it.
        blocks: a class, classes, a function of a module, or paths. Default: the repeated layers
            that the model's structure shows, or modules outside of or around these where a
            predicted step shows that this lowers the peak; where structure shows none, those that
            `apply_activation_checkpointing(model, batch=batch)` finds.
        offload: "cpu", "disk" or a directory, where activations may wait.
        host_budget: the most bytes that may wait there at one time. Default: what is free.
        autocast: run forward under torch.autocast with this dtype.
        micro_batches: split the batch for gradient accumulation.
        chunks: whether the head and MLPs may run in chunks of rows, whose results differ by
            rounding. What works on each row alone is found by a probe of the modules, or of copies
            with random numbers where they have no values.
        measure: whether to time real steps. "auto": if the model and the batch have values.
        steps: how many of each sample, each after one to warm up.
        device: predict for "cpu" or "cuda". Default: the model's; of a model on meta, "cuda".
        compiled: plan for a model that is to be compiled:

                model = memopt.plan(model, batch, "40GiB", compiled=True).apply()

            `memopt.compile` then chooses what each graph keeps, within what weights, optimizer
            states and the batch leave of the budget. step, blocks, offload, host_budget, chunks and
            measure are not for it.

    Under DistributedDataParallel, and FSDP2's fully_shard, blocks are those of the module inside;
    FSDP2's steps are not predicted: real ones are watched, and the optimizer's bytes are estimated
    from its kind.

    Returns:
        A `Plan`; with `compiled` a `CompiledPlan`, whose `apply()` returns the compiled model: it
        runs a step, measures its peak, and compiles for less where that is above the budget.

    Raises:
        TypeError: an argument is of another kind, or the model returns no loss.
        ValueError: an argument is out of its range, the model has no blocks, or has regions.
        BudgetTooSmall: a ValueError: no plan is within the budget. Says the least budget, what is
            alive at its peak, and what would lower it.
        Whatever the step raises: its own error. The model is as before.

    Source: the dynamic programme is a multiple-choice knapsack over a chain, in the spirit of
    Beaumont et al., "Optimal checkpointing for heterogeneous chains" (2019) and "Efficient
    combination of rematerialization and offloading" (2021), with fates for choices.
    """
    check_flags("plan", compiled=compiled)
    if compiled:
        _alone(
            {
                "step": step,
                "blocks": blocks,
                "offload": offload,
                "host_budget": host_budget,
                "chunks": None if chunks is True else chunks,
                "measure": measure,
            }
        )
        live = live_of(model, batch, optimizer, loss, None, autocast, micro_batches, device, False)
        return compiled_plan(live, ranks.least(_budget(budget, live.step)))
    check_measure("plan", measure)
    check_count("plan", "steps", steps)
    if not isinstance(chunks, bool):
        raise TypeError(
            f"plan: chunks must be True or False, since a plan chooses how many, got {chunks!r}"
        )
    room = None if host_budget is None else as_bytes("plan: host_budget", host_budget)
    if room is not None and offload is None:
        raise ValueError(
            f"plan: host_budget must be given with offload, which takes it, got {as_text(room)}"
        )
    if offload is not None:
        directory_of("plan: offload", offload)
    live = live_of(
        model, batch, optimizer, loss, blocks, autocast, micro_batches, device, step=step
    )
    live.chunks = live.chunks and chunks
    if is_host(model, live.target):
        check_is_elsewhere("plan", offload)
    if measure is True and not live.runs:
        raise ValueError(
            "plan: measure=True must have a model and a batch with values, on the device "
            f"that the plan is for, got {live.target} as that device and "
            f"{next(model.parameters()).device.type} as the model's"
        )
    live.steps = steps if measure is not False else 0
    wanted = ranks.least(_budget(budget, live.step))
    terms = Terms()
    if offload is not None:
        speeds = speeds_to(offload, next(model.parameters()).device, live.runs and live.steps > 0)
        copies = ranks.most(copies_in_flight("plan", offload))
        terms = Terms(offload, *speeds, room, copies)
    return made(live, live.profile(), wanted, terms)


def _alone(given: Mapping[str, object]) -> None:
    """Refuses what compiled=True has no use for."""
    for name, value in given.items():
        if value not in (None, "auto"):
            raise ValueError(
                f"plan: compiled=True must be without {name}, since memopt.compile chooses "
                f"what each graph keeps and apply() measures a step, got {value!r}"
            )


def live_of(
    model: nn.Module,
    batch: Any,
    optimizer: OptimizerLike,
    loss: LossLike,
    blocks: BlocksLike,
    autocast: torch.dtype | None,
    micro_batches: int = 1,
    device: str | torch.device | None = None,
    with_blocks: bool = True,
    step: StepFunction = None,
) -> Live:
    """The step that is planned, of arguments that are checked."""
    _check_model(model)
    entry, model = model, without_ddp(model)
    target = target_of("plan", model, device)
    asked = asked_step(
        "plan", model, batch, optimizer, loss, autocast, micro_batches, function=step
    )
    runs = has_values(model, asked.batch) and target == home_of(model).type
    return Live(
        asked,
        blocks_of(asked, blocks, target, runs) if with_blocks else (),
        target,
        steps=0,
        runs=runs,
        predictable=not is_sharded(model),
        entry=None if entry is model else entry,
    )


def _budget(budget: int | float | str | None, step: Step) -> Size:
    if budget is not None:
        return as_bytes("plan: budget", budget)
    device = home_of(step.model)
    free = free_bytes(device) if has_values(step.model, step.batch) else None
    if free is None:
        raise ValueError(
            "plan: budget must be given where the device does not say what is free, got None"
        )
    return Size(free + bytes_here(step), "the memory that is free")


def _check_model(model: nn.Module) -> None:
    check_can_patch("plan", "model", model)
    for path, module in model.named_modules():
        where = f" at {path!r}" if path else ""
        if is_compiled(module):
            raise TypeError(
                f"plan: model must not be compiled, got {type(module).__name__}{where}; "
                "memopt.plan(model, batch, budget, compiled=True).apply() compiles it"
            )
    check_is_plain("plan", model)
