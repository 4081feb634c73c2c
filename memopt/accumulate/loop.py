"""`memopt.accumulate`: a batch in micro-batches, with the gradients of the whole."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from memopt.accumulate.fit import check_budget, largest_micro_batch
from memopt.accumulate.sync import is_sharded, synchronized
from memopt.accumulate.undo import Before, Gradients, watched
from memopt.accumulate.weight import Weight, counter
from memopt.anatomy.batches import as_dict, call, device_of, loss_in, rows_of, slice_of
from memopt.anatomy.hollow import DependsOnValues
from memopt.anatomy.step import LossLike, Step


@dataclass(frozen=True)
class Accumulated:
    """What `memopt.accumulate` did."""

    loss: Tensor
    """Of the whole batch, without history, on the model's device."""
    micro_batch: int
    """Rows of a micro-batch; of the smaller ones, if memory ran out."""
    micro_batches: int
    """How many ran."""
    out_of_memory: int
    """How often memory ran out."""


def accumulate(
    model: nn.Module,
    batch: Any,
    *,
    micro_batch: int | Literal["auto"] = "auto",
    loss: LossLike = None,
    weight: Weight = "rows",
    labels: str = "labels",
    ignore_index: int = -100,
    budget: int | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    autocast: torch.dtype | None = None,
) -> Accumulated:
    """Forward and backward of a batch in micro-batches; the gradients are those of the whole batch.

        result = memopt.accumulate(model, batch, micro_batch=4, weight="next tokens")
        optimizer.step()
        optimizer.zero_grad()

    A micro-batch's loss counts with its share of the batch: the whole batch's mean is the mean of
    the micro-batches' means only if they are alike, and with a last one that is smaller, or labels
    that are ignored, they are not. Gradients are added to those that are there. They equal the
    whole batch's but for rounding, if the model treats rows alone: batch norm does not, and dropout
    draws other numbers (those that the micro-batches would draw one after another).

    Under DistributedDataParallel gradients are reduced once, with the last micro-batch (`no_sync`),
    and under FSDP2 too (`set_requires_gradient_sync`). Each process counts its own batch, as it
    would without accumulation.

    "auto" takes the largest micro-batch whose predicted peak (see `memopt.anatomy`) fits, and keeps
    it for the next batch of this model and shape. If memory runs out nevertheless, the micro-batch
    is tried again with half as many rows, from the same random numbers and buffers; if its backward
    had reached a gradient, the whole batch is, from the gradients that were there at the beginning.

    Args:
        model: a module, also in DDP or FSDP2.
        batch: on the model's device: a mapping of keyword arguments, a tuple or list of positional
            ones, or the only one. Tensors are cut whose first dimension is the first one's; all
            else goes to every micro-batch.
        micro_batch: rows, or "auto".
        loss: makes the loss of what the model returns. Default: the output's `loss`, its first
            element or the output.
        weight: what the loss is a mean of: "rows"; "tokens", the entries of `labels` that are not
            `ignore_index`; "next tokens", those but the first of each row, which causal language
            models of transformers do not predict; or a function of a micro-batch that counts.
            "sum": the loss is a sum.
        labels: the key of the labels in a mapping.
        budget: of "auto", in bytes: for weights, gradients and, with `optimizer`, its states too.
            Default: what is free on the device. On the CPU there must be one.
        optimizer: for the prediction of "auto" only.
        scaler: a torch.amp.GradScaler, which scales the losses. Its step and update are yours.
        autocast: run forward under torch.autocast with this dtype.

    Returns:
        An `Accumulated`.

    Raises:
        TypeError: an argument is of another kind, or the model returns no loss.
        ValueError: an argument is out of its range; tensors are on another device; nothing counts
            (all labels are ignored); or "auto" on the CPU without a budget, or with FSDP, where all
            processes must take the same number of micro-batches.
        torch.OutOfMemoryError: one row does not fit; or memory ran out while gradients were being
            reduced, or with a `micro_batch` given in rows.

    Source: the normalisation is that of transformers' Trainer since 2024 (num_items_in_batch).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"accumulate: model must be an nn.Module, got {type(model).__name__}")
    batch = as_dict(batch)
    device = device_of("accumulate", model, batch)
    rows = rows_of("accumulate", batch)
    run = _Run(model, batch, loss, counter(weight, labels, ignore_index), scaler, autocast, device)
    if micro_batch != "auto":
        if isinstance(micro_batch, bool) or not isinstance(micro_batch, int):
            raise TypeError(
                f'accumulate: micro_batch must be an int or "auto", got {micro_batch!r}'
            )
        if micro_batch < 1:
            raise ValueError(f"accumulate: micro_batch must be at least 1, got {micro_batch}")
        return run.all(min(micro_batch, rows), step_down=False)
    if is_sharded(model):
        raise ValueError(
            "accumulate: micro_batch must be a number under FSDP, where all processes must take as "
            'many micro-batches, got "auto"'
        )
    step = Step(model, batch, optimizer, loss, autocast)
    known = _chosen.setdefault(model, {})
    key = (budget, autocast, *map(_described, pytree.tree_leaves(batch)))
    if key not in known:
        known[key] = _choose(step, budget, device, rows)
    result = run.all(known[key], step_down=True)
    known[key] = result.micro_batch
    return result


_chosen: WeakKeyDictionary[nn.Module, dict[Hashable, int]] = WeakKeyDictionary()


def _described(leaf: object) -> Hashable:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf).__name__


def _choose(step: Step, budget: int | None, device: torch.device, rows: int) -> int:
    is_free = budget is None
    if budget is not None:
        check_budget("accumulate", budget, step.model)
    elif device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        budget = free + unused
    else:
        raise ValueError(
            f'accumulate: micro_batch="auto" on {device.type} must have a budget in bytes, got None'
        )
    try:
        return largest_micro_batch(_unwrapped(step), budget, is_free, device.type)
    except DependsOnValues:
        return rows  # and fewer, when memory runs out


def _unwrapped(step: Step) -> Step:
    """Without DDP, whose reducer is no part of a copy."""
    if isinstance(step.model, nn.parallel.DistributedDataParallel):
        step.model = step.model.module
    return step


class _Run:
    """One batch."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: LossLike,
        count: Callable[[Any], float] | None,
        scaler: Any,
        autocast: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self._model = model
        self._batch = batch
        self._loss = loss
        self._count = count
        self._scaler = scaler
        self._autocast = autocast
        self._device = device
        self._rows = rows_of("accumulate", batch)
        self._total = 1.0 if count is None else float(count(batch))
        if self._total <= 0:
            raise ValueError(
                "accumulate: weight must count something in the batch, got 0: are all labels "
                "ignored?"
            )

    def all(self, size: int, step_down: bool) -> Accumulated:
        """Every micro-batch. `step_down`: with fewer rows where memory runs out."""
        if not step_down:
            return self._from(size, None, None, 0)
        gradients = Gradients(self._model)
        begin = Before(self._model, self._device)
        failures = 0
        with watched(self._model) as was_touched:
            while True:
                try:
                    return self._from(size, was_touched, gradients, failures)
                except _Again as again:
                    size, failures = again.size, again.failures
                    gradients.restore()
                    begin.restore()

    def _from(
        self,
        size: int,
        was_touched: Callable[[], bool] | None,
        gradients: Gradients | None,
        failures: int,
    ) -> Accumulated:
        sum_of_losses = torch.zeros((), dtype=torch.float64, device=self._device)
        start, number = 0, 0
        end_of_rows = self._last_counted()
        while start < end_of_rows:
            end = min(start + size, end_of_rows)
            part = slice_of(self._batch, start, end)
            share = 1.0 if self._count is None else float(self._count(part)) / self._total
            if share == 0 and end < end_of_rows:
                start = end  # a mean of nothing: no number
                continue
            if was_touched is None:
                sum_of_losses += self._one(part, share, end == end_of_rows)
            else:
                before = Before(self._model, self._device)
                was_touched()
                try:
                    sum_of_losses += self._one(part, share, end == end_of_rows)
                except torch.OutOfMemoryError:
                    failures += 1
                    touched = was_touched()
                    if end - start == 1 or (touched and self._reduces(end == end_of_rows)):
                        raise
                    size = -(-(end - start) // 2)
                    if touched:
                        raise _Again(size, failures) from None
                    before.restore()
                    self._give_back()
                    continue
            start, number = end, number + 1
        return Accumulated(sum_of_losses.float(), size, number, failures)

    def _give_back(self) -> None:
        """The allocator's cache may be in pieces too small for what comes."""
        if self._device.type not in ("cpu", "meta"):
            torch.get_device_module(self._device).empty_cache()

    def _last_counted(self) -> int:
        """Behind the last row that counts: what comes after has no loss, and the micro-batch with
        which gradients are reduced must have one.
        """
        if self._count is None:
            return self._rows
        end = self._rows
        while end > 1 and not self._count(slice_of(self._batch, end - 1, end)):
            end -= 1
        return end

    def _reduces(self, is_last: bool) -> bool:
        return is_last and isinstance(self._model, nn.parallel.DistributedDataParallel)

    def _one(self, part: Any, share: float, is_last: bool) -> Tensor:
        """Forward and backward. Returns the share of the loss."""
        with synchronized(self._model, is_last):
            with self._context():
                output = call(self._model, part)
                loss = loss_in("accumulate", output if self._loss is None else self._loss(output))
            del output
            loss = loss.reshape(()) * share
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        return loss.detach().to(self._device, torch.float64)

    def _context(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast)


class _Again(Exception):
    """A gradient was reached before memory ran out: the batch begins again."""

    def __init__(self, size: int, failures: int) -> None:
        super().__init__(size)
        self.size = size
        self.failures = failures
