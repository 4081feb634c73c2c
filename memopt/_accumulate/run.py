"""One batch in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memopt._accumulate.peers import Peers
from memopt._accumulate.undo import (
    before_backward,
    before_forward,
    gradients_watched,
    no_part_of_gradients,
)
from memopt._accumulate.weight import total_of, warn_if_not_whole, warn_of_a_step_inside
from memopt.memory.backwards import weighted_backward
from memopt.memory.batches import call, loss_in, rows_of, slice_of
from memopt.memory.cuts import cuts, rows_of_next
from memopt.memory.optimizers import trained_beside
from memopt.memory.parallel import gathers_parameters, is_sharded, syncing
from memopt.memory.step import LossLike, StepFunction, function_name


@dataclass(frozen=True)
class Accumulated:
    """A report of what `memopt.accumulate` did."""

    loss: Tensor
    """The loss of the whole batch, without history, on the model's device."""
    micro_batch: int
    """Rows of a micro-batch; of the smaller ones, if memory ran out."""
    micro_batches: int
    """How many ran."""
    out_of_memory: int
    """How often memory ran out."""


class Run:
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
        function: StepFunction = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._model = model
        self._beside = [p for _, p in trained_beside(model, loss, optimizer)]
        self._function = function
        self._batch = batch
        self._loss = loss
        self._count = count
        self._scaler = scaler
        self._autocast = autocast
        self._device = device
        self._rows = rows_of("accumulate", batch)
        self._total = total_of(count, batch)

    def all(self, size: int, step_down: bool) -> Accumulated:
        """Every micro-batch. `step_down`: with fewer rows where memory runs out."""
        failures = 0
        with ExitStack() as stack:
            stack.enter_context(no_part_of_gradients(self._trained()))
            if not step_down:
                return self._from(size, None, 0)
            begin = before_backward(self._model, self._trained())
            was_touched = stack.enter_context(gradients_watched(self._trained()))
            while True:
                try:
                    return self._from(size, was_touched, failures)
                except _Again as again:
                    size, failures = again.size, again.failures
                    begin.restore()

    def rows(self, rows: int, size: int) -> None:
        """Micro-batches of the first rows alone, to be measured."""
        for start, end in cuts(rows, size):
            self._one(slice_of(self._batch, start, end), 1.0, False)

    def all_alike(self, size: int, peers: Peers) -> Accumulated:
        """Run a sharded model, in all processes alike: with fewer rows where memory runs
        out in one of them. What others have reduced by then is of no use, and all begin again.
        """
        begin = before_backward(self._model, self._trained())
        failures = 0
        while True:
            done = self.once(size, peers)
            if done is not None:
                return replace(done, out_of_memory=failures)
            failures += 1
            begin.restore()
            self._give_back()
            if size == 1:
                raise torch.OutOfMemoryError("accumulate: one row does not fit, in some process")
            size = -(-size // 2)

    def once(self, size: int, peers: Peers) -> Accumulated | None:
        """Every micro-batch, as many as the others have; None where memory ran out in a process."""
        mine = list(self._parts(size))
        number = peers.most(len(mine))
        sum_of_losses = torch.zeros((), dtype=torch.float64, device=self._device)
        with peers.counted():
            for _ in range(number - len(mine)):
                nothing = partial(self._nothing, size, False)
                peers.run(nothing, nothing)
            for place, (part, share) in enumerate(mine, 1):
                is_last = place == len(mine)
                one = partial(self._one, part, share, is_last)
                loss = peers.run(one, partial(self._nothing, size, is_last))
                if loss is not None:
                    sum_of_losses += loss
        if peers.most(int(peers.failed)):
            return None
        self._check_shares(sum(share for _, share in mine))
        return Accumulated(sum_of_losses.float(), size, number, 0)

    def _parts(self, size: int) -> Iterator[tuple[Any, float]]:
        """The micro-batches that count, each with its share."""
        for start, end in cuts(self._last_counted(), size):
            part = slice_of(self._batch, start, end)
            share = self._share(part)
            if share:
                yield part, share

    def _nothing(self, size: int, is_last: bool) -> None:
        """A micro-batch whose gradients are zeros, so that others get on: of two rows, since a
        batch norm takes no single one.
        """
        before = before_forward(self._model)
        end = self._last_counted()
        self._one(slice_of(self._batch, max(0, end - min(size, 2)), end), 0.0, is_last)
        before.restore()

    def _share(self, part: Any) -> float:
        return 1.0 if self._count is None else float(self._count(part)) / self._total

    def _versions(self) -> list[int]:
        """Counts of how often the weights were written; none where they are gathered for calls."""
        if any(is_sharded(m) or gathers_parameters(m) for m in self._model.modules()):
            return []
        trained = (p for p in self._trained() if p.requires_grad)
        return [p._version for p in trained if not p.is_inference()]

    def _trained(self) -> list[Tensor]:
        """The parameters that it has now: FSDP2 has sharded and whole ones in turn."""
        return [*self._model.parameters(), *self._beside]

    def _check_shares(self, shares: float) -> None:
        if self._count is not None:
            warn_if_not_whole(shares)

    def _from(
        self,
        size: int,
        was_touched: Callable[[], bool] | None,
        failures: int,
    ) -> Accumulated:
        sum_of_losses = torch.zeros((), dtype=torch.float64, device=self._device)
        start, number, shares = 0, 0, 0.0
        end_of_rows = self._last_counted()
        weights = self._versions() if size < end_of_rows else []
        while start < end_of_rows:
            end = start + rows_of_next(end_of_rows - start, size)
            part = slice_of(self._batch, start, end)
            share = self._share(part)
            if share == 0 and end < end_of_rows:
                start = end  # a mean of nothing: no number
                continue
            if was_touched is None:
                sum_of_losses += self._one(part, share, end == end_of_rows)
            else:
                before = before_forward(self._model)
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
            if weights and number == 0 and end < end_of_rows and self._versions() != weights:
                warn_of_a_step_inside()
            start, number, shares = end, number + 1, shares + share
        self._check_shares(shares)
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
        with syncing(self._model, is_last):
            if self._function is not None:
                return self._of_function(self._function, part, share)
            with self._context():
                output = call(self._model, part)
                loss = loss_in("accumulate", output if self._loss is None else self._loss(output))
            del output
            loss = loss.reshape(()) * share
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        return loss.detach().to(self._device, torch.float64)

    def _of_function(self, function: Any, part: Any, share: float) -> Tensor:
        """Forward and backward by a function of the user's."""
        with weighted_backward("accumulate", share) as losses, self._context():
            function(self._model, part)
        if not losses:
            raise ValueError(
                "accumulate: step must run backward, got a function that ran none "
                f"({function_name(function)})"
            )
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        return total + sum(loss.to(total) for loss in losses) * share

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
