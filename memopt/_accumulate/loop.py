"""`memopt.accumulate`: a batch in micro-batches, with the gradients of the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from memopt._accumulate.chosen import Kind, choices_of
from memopt._accumulate.fit import (
    checked_budget,
    largest_in_free,
    largest_measured,
    largest_micro_batch,
    largest_watched,
)
from memopt._accumulate.peers import Peers
from memopt._accumulate.run import Accumulated, Run
from memopt._accumulate.weight import Weight, counter, warn_if_not_rows
from memopt._progress import progress
from memopt.memory.allocator import allocated_bytes, free_bytes
from memopt.memory.asked import check_function, check_module
from memopt.memory.batches import device_of, rows_of
from memopt.memory.leaves import as_dict
from memopt.memory.lists import check_cut
from memopt.memory.optimizers import as_optimizer
from memopt.memory.parallel import bucket_bytes, is_sharded, without_ddp
from memopt.memory.predicted.outcome import DependsOnValues
from memopt.memory.predicted.predict import check_shapes
from memopt.memory.step import LossLike, Step, StepFunction


def accumulate(
    model: nn.Module,
    batch: Any,
    *,
    micro_batch: int | Literal["auto"] = "auto",
    loss: LossLike = None,
    step: StepFunction = None,
    weight: Weight | None = None,
    labels: str = "labels",
    ignore_index: int = -100,
    budget: int | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    autocast: torch.dtype | None = None,
) -> Accumulated:
    """Run forward and backward of a batch in micro-batches, with the gradients of the whole batch.

        result = memopt.accumulate(model, batch, micro_batch=4, weight="next tokens")
        optimizer.step()
        optimizer.zero_grad()

    A micro-batch's loss counts with its share of the batch: the whole batch's mean is the mean of
    the micro-batches' means only if all have the same size, and with a last one that is smaller, or
    labels that are ignored, they do not. Gradients are added to existing ones. They equal the whole
    batch's but for rounding, if the model treats each row by itself: batch norm does not, and
    dropout draws other numbers (those that the micro-batches would draw one after another).

    Under DistributedDataParallel gradients are reduced once, with the last micro-batch (`no_sync`),
    and under FSDP2 too (`set_requires_gradient_sync`). Each process counts its own batch, as it
    would without accumulation. With "auto" under FSDP2 all processes take as many micro-batches, of
    the rows that fit in each of them; real steps show how many that are, with all that they change
    put back. If memory runs out in one process, the whole batch begins again in all, with half as
    many rows, from the gradients that were there. Memory that runs out with one row is an error in
    that process alone, and the others wait for it until their timeout.

    "auto" takes the largest micro-batch whose predicted peak (see `memopt.anatomy`) fits with the
    whole batch, and keeps it for the next batch of these shapes, as long as the loss, the
    optimizer and the model stay as they are (its modules and settings, what is frozen, hooks).
    Where a step cannot be predicted, a few real ones are measured. If memory runs out nevertheless,
    the micro-batch is tried again with half as many rows, from the same random numbers and buffers;
    if its backward had reached a gradient, the whole batch is, from the gradients that were there
    at the beginning.

    Args:
        model: a module, also in DDP or FSDP2.
        batch: on the model's device: a mapping of keyword arguments, a tuple or list of positional
            ones, or the only one. Tensors are cut whose first dimension is the first one's, nested
            and packed sequences among them, also in dataclasses; all else goes to every
            micro-batch. Lists with an entry for each row are refused, and other objects with rows.
        micro_batch: rows, or "auto". The last one has what is left, which is a single row only
            where it must be: one before it has a row fewer then.
        loss: makes the loss of what the model returns. Default: the output's `loss`, its first
            element or the output.
        step: `step(model, micro_batch)` runs forward and backward itself, see `memopt.plan`. What
            each of its backwards adds to gradients counts with the micro-batch's share; gradients
            that it puts into `.grad` itself do not. The report's loss is the sum of all losses.
        weight: what the loss is a mean of: "rows" (the default); "tokens", the entries of `labels`
            that are not `ignore_index`; "next tokens", those but the first of each row, which
            causal language models of transformers do not predict; or a function of a micro-batch
            that counts, so that those of a batch add up. "sum": the loss is a sum. Where nothing is
            given and the batch shows that rows have different numbers of targets (`ignore_index`
            among integers, packed and nested sequences, `num_items_in_batch`), a warning says so.
        labels: the key of the labels in a mapping.
        budget: of "auto", for weights, gradients and, with `optimizer`, its states too. Bytes or a
            string, such as "40GiB". Default: what is free on the device. On the CPU there must be
            one.
        optimizer: for the prediction of "auto" only.
        scaler: a torch.amp.GradScaler, which scales the losses. Its step and update are yours.
        autocast: run forward under torch.autocast with this dtype.

    Returns:
        An `Accumulated`.

    After an error weights that had no gradient have none, so that the batch can be tried again;
    gradients that were there have what the micro-batches before it added.

    Raises:
        TypeError: an argument is of another kind, or the model returns no loss.
        ValueError: an argument is out of its range; tensors are on another device; nothing counts
            (all labels are ignored); a budget below what one row takes (a memopt.BudgetTooSmall,
            which says how much that is) or without "auto"; "auto" on the CPU without a budget,
            or with an FSDP2 model whose processes cannot go back together (HSDP, SyncBatchNorm,
            PyTorch before 2.13); `step` runs no backward, or one with create_graph.
        torch.OutOfMemoryError: one row does not fit; or memory ran out while gradients were being
            reduced, or with a `micro_batch` given in rows.

    Source: the normalisation is that of transformers' Trainer since 2024 (num_items_in_batch).
    """
    check_module("accumulate", model)
    batch = as_dict(batch)
    device = device_of("accumulate", model, batch)
    rows = rows_of("accumulate", batch)
    check_cut("accumulate", batch)
    check_function("accumulate", step, loss, autocast)
    if step is not None and scaler is not None:
        raise ValueError(
            "accumulate: scaler must not be given with step, which scales its losses itself, got "
            f"{type(scaler).__name__}"
        )
    if scaler is not None and not callable(getattr(scaler, "scale", None)):
        raise TypeError(
            "accumulate: scaler must be a torch.amp.GradScaler or None, got "
            f"{type(scaler).__name__}"
        )
    if not isinstance(optimizer, torch.optim.Optimizer | None):
        raise TypeError(
            "accumulate: optimizer must be the torch.optim.Optimizer that steps after it, or None, "
            f"got {optimizer!r}"
        )
    as_optimizer("accumulate", optimizer, ())
    count = counter(weight, labels, ignore_index)
    run = Run(model, batch, loss, count, scaler, autocast, device, step, optimizer)
    if micro_batch != "auto":
        if isinstance(micro_batch, bool) or not isinstance(micro_batch, int):
            raise TypeError(
                f'accumulate: micro_batch must be an int or "auto", got {micro_batch!r}'
            )
        if micro_batch < 1:
            raise ValueError(f"accumulate: micro_batch must be at least 1, got {micro_batch}")
        if budget is not None:
            raise ValueError(
                'accumulate: budget must be given with micro_batch="auto" alone, which keeps to '
                f"it, got micro_batch={micro_batch}"
            )
        if weight is None:
            warn_if_not_rows(batch, micro_batch, ignore_index)
        return run.all(min(micro_batch, rows), step_down=False)
    whole = Step(model, batch, optimizer, loss, autocast, function=step, who="accumulate")
    check_shapes(whole)
    choices, kind = choices_of(model), Kind(whole, repr(budget))
    known = choices.rows(kind)
    if is_sharded(model):
        peers = Peers(model)
        size = peers.least(known or 0) or _choose_alike(whole, budget, scaler, peers)
    else:
        size = _choose(whole, budget, device, rows, run) if known is None else known
        size = choices.most(kind, size)
    if weight is None:
        warn_if_not_rows(batch, size, ignore_index)
    result = run.all_alike(size, peers) if is_sharded(model) else run.all(size, step_down=True)
    choices.remember(kind, result)
    return result


@progress("memopt.accumulate")
def _choose(step: Step, budget: int | str | None, device: torch.device, rows: int, run: Run) -> int:
    inner = replace(step, model=without_ddp(step.model))
    if budget is None:
        try:
            return largest_in_free(inner, _free(device), device.type)
        except DependsOnValues:
            return rows  # and fewer, when memory runs out
    nbytes, buckets = checked_budget(step.who, budget, step.model), bucket_bytes(step.model)
    try:
        return largest_micro_batch(inner, nbytes, buckets, device.type)
    except DependsOnValues:
        return largest_measured(step, nbytes, buckets, run)


@progress("memopt.accumulate")
def _choose_alike(step: Step, budget: int | str | None, scaler: Any, peers: Peers) -> int:
    """Search by real steps, since those of a sharded model are not predicted."""
    device = next(step.model.parameters()).device
    given = allocated_bytes(device) + _free(device) if budget is None else budget
    allowed = 0
    error: Exception | None = None
    try:
        allowed = checked_budget("accumulate", given, step.model)
    except (TypeError, ValueError) as found:
        error = found
    if not peers.least(int(error is None)):
        raise error or ValueError("accumulate: budget must be above the weights in all processes")

    def attempt(batch: Any, size: int) -> bool:
        every_row = counter("rows", "", 0)
        run = Run(
            *(step.model, batch, step.loss, every_row, scaler, step.autocast, device),
            *(step.function, step.optimizer),
        )
        return run.once(size, peers) is not None

    return largest_watched(step, allowed, budget is None, attempt, peers)


def _free(device: torch.device) -> int:
    """Bytes of a device that could be allocated."""
    free = None if device.type == "cpu" else free_bytes(device)
    if free is None:
        raise ValueError(
            f'accumulate: micro_batch="auto" on {device.type} must have a budget in bytes, got None'
        )
    return free
