"""Searches, by prediction, for the most that fits into a budget of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, overload

import torch
from torch import nn

from memopt._accumulate.peers import Peers
from memopt._accumulate.run import Run
from memopt._arguments import check_count
from memopt._progress import progress
from memopt.memory.asked import asked_parameters, check_function, check_module, target_of
from memopt.memory.batches import positions_of, resized, rows_of, slice_of
from memopt.memory.cuts import leaves_one
from memopt.memory.depth import Depth
from memopt.memory.optimizers import OptimizerLike, as_optimizer
from memopt.memory.peak import bytes_here, peak_of, peak_of_step
from memopt.memory.predicted.fits import (
    PeakOf,
    largest,
    largest_part,
    peak_with_part,
    search_parts,
)
from memopt.memory.predicted.predict import Looks
from memopt.memory.search import NEVER_FITS, search
from memopt.memory.sizes import BudgetTooSmall, as_bytes, at_least
from memopt.memory.step import LossLike, Step, StepFunction
from memopt.memory.storages import storages
from memopt.memory.unchanged import Written, unchanged
from memopt.place import Place
from memopt.whatif.fates import Checkpoint, Fates, predicted_trace

Batch = Any | Callable[[int], Any]


@overload
def largest_batch(
    model: nn.Module,
    batch: Batch,
    budget: int | str,
    *,
    loss: LossLike = ...,
    step: StepFunction = ...,
    optimizer: OptimizerLike = ...,
    autocast: torch.dtype | None = ...,
    device: str | torch.device | None = ...,
    recipes: bool = ...,
    head: bool = ...,
    chunks: int | None = ...,
    checkpoint: Checkpoint = ...,
    offload: Place | None = ...,
    limit: int = ...,
) -> int: ...


@overload
def largest_batch(model: Callable[[int], object], batch: int | str, *, limit: int = ...) -> int: ...


@overload
def largest_batch(
    model: Callable[[int], object], *, budget: int | str, limit: int = ...
) -> int: ...


@progress("memopt.largest_batch")
def largest_batch(
    model: nn.Module | Callable[[int], object],
    batch: Batch = None,
    budget: int | str | None = None,
    *,
    loss: LossLike = None,
    step: StepFunction = None,
    optimizer: OptimizerLike = torch.optim.AdamW,
    autocast: torch.dtype | None = None,
    device: str | torch.device | None = None,
    recipes: bool = False,
    head: bool = False,
    chunks: int | None = None,
    checkpoint: Checkpoint = None,
    offload: Place | None = None,
    limit: int = 1 << 16,
) -> int:
    """The most rows with which a training step's peak is at most `budget`, as predicted.

    Nothing runs: see `memopt.anatomy`, whose options these are. Takes some six predictions.

        memopt.largest_batch(model, batch, budget="40GiB", autocast=torch.bfloat16)

    With a function of the number of rows, `memopt.largest_batch(fn, budget)`, nothing is predicted:
    the function runs at some sizes, and its peak is measured. It is a step of yours, whatever it
    does; it should leave as much memory as it found (set gradients to None). What it changes stays
    changed.

    Args:
        model: on any device, also meta. Or a function that does a training step with a number of
            rows; then `limit` is the only other argument.
        batch: one of any size, whose tensors are resized in their first dimension; or a function of
            the number of rows that makes one (of meta tensors, if you like).
        step: `step(model, batch)` runs forward and backward itself, see `memopt.plan`.
        budget: for all of it: weights, gradients and optimizer states too. Bytes or a string, such
            as "40GiB".
        limit: the most rows to try.

    Returns:
        From 0, if one row does not fit, to `limit`.

    Raises:
        TypeError, ValueError: an argument is no such thing, or `budget` is below the weights.
        DependsOnValues: the step looks at values, and cannot be predicted.
    """
    if not isinstance(model, nn.Module) and callable(model):
        return largest_step(model, batch if budget is None else budget, limit)
    fates = Fates(recipes, checkpoint, head, chunks, offload=offload, who="largest_batch")
    asked, wanted = _step("largest_batch", model, budget, loss, step, optimizer, autocast, limit)
    return _largest(asked, batch, 0, wanted, fates, device, limit)


@progress("memopt.longest_sequence")
def longest_sequence(
    model: nn.Module,
    batch: Batch,
    budget: int | str,
    *,
    loss: LossLike = None,
    step: StepFunction = None,
    optimizer: OptimizerLike = torch.optim.AdamW,
    autocast: torch.dtype | None = None,
    device: str | torch.device | None = None,
    recipes: bool = False,
    head: bool = False,
    chunks: int | None = None,
    checkpoint: Checkpoint = None,
    offload: Place | None = None,
    limit: int = 1 << 20,
) -> int:
    """The longest sequence with which a training step's peak is at most `budget`.

    As `largest_batch`, but tensors are resized in their second dimension, or `batch` is a function
    of the length. Of a model with a table of positions its size is the limit.
    """
    fates = Fates(recipes, checkpoint, head, chunks, offload=offload, who="longest_sequence")
    asked, wanted = _step("longest_sequence", model, budget, loss, step, optimizer, autocast, limit)
    limit = min(limit, positions_of(model, limit))
    return _largest(asked, batch, 1, wanted, fates, device, limit)


def largest_micro_batch(step: Step, budget: int, buckets: int, device: str) -> int:
    """The most rows of the step's batch that fit in addition to the whole of it, while gradients
    are allocated already.

    Args:
        buckets: bytes that a wrapper of the model holds.

    Raises:
        BudgetTooSmall: not even one row fits.
    """
    peak, beside = _predicted(Fates(who=step.who), device), _beside(step, device) + buckets
    size = largest_part(step, budget - beside, peak)
    if not size:
        raise _too_small(step, budget, lambda size: beside + peak_with_part(step, size, peak))
    return size


def largest_in_free(step: Step, free: int, device: str) -> int:
    """`largest_micro_batch` where the budget is what is not allocated yet, and at least 1: memory
    may do for a row nevertheless.
    """
    peak, beside = _predicted(Fates(who=step.who), device), _beside(step, device)
    return max(1, largest_part(step, free + bytes_here(step) - beside, peak))


def _too_small(step: Step, budget: int, peak: Callable[[int], int]) -> BudgetTooSmall:
    """Says what the fewest rows take that the model runs with."""
    rows = rows_of(step.who, step.batch)
    sizes = (min(size, rows) for size in (1, 2, 3, *(4 << n for n in range(rows.bit_length()))))
    size, needed = next((s, n) for s in sizes if (n := peak(s)) < NEVER_FITS or s == rows)
    least, got = at_least(needed, budget)
    what = "one row" if size == 1 else f"{size} rows"
    return BudgetTooSmall(
        f"{step.who}: budget must be at least the {least} that this step takes in micro-batches of "
        f"{what}, got {got}; memopt.fit also changes what is kept for backward",
        needed,
    )


def _beside(step: Step, device: str) -> int:
    """Bytes that are there in an accumulation and not in a step that is predicted."""
    gradients = [p.grad for _, p in step.trained if p.grad is not None]
    there = sum(storages(gradients).values())
    # To go back if memory runs out: buffers twice, gradients on the host.
    copies = 2 * sum(storages(step.model.buffers()).values())
    return there + copies + (there if device == "cpu" else 0)


def largest_measured(step: Step, budget: int, buckets: int, run: Run) -> int:
    """`largest_micro_batch` for a step that looks at values, by a few steps that run."""
    rows = rows_of(step.who, step.batch)
    device = next(step.model.parameters()).device
    depth = Depth()
    ran: set[int] = set()

    def of_parts(size: int) -> int:
        """Rows of two micro-batches, and of a last single row where the batch leaves one."""
        return min(2 * size + leaves_one(rows, size), rows)

    def measured(size: int) -> int:
        try:
            with unchanged(*step.roots):
                found = peak_of_step(step, lambda size: run.rows(of_parts(size), size), size)
        except Exception:
            if not leaves_one(rows, size) and (not ran or size > min(ran)):
                raise
            return NEVER_FITS  # the model's own: a batch norm takes no single row
        ran.add(size)
        return found

    def peak(size: int) -> int:
        return depth.run(lambda: measured(size), lambda peak: peak)

    beside = _beside(step, device.type) + buckets
    size = search_parts(peak, budget - beside, (2, 4), rows, rows)
    if not size:
        raise _too_small(step, budget, lambda size: beside + peak(size))
    return size


def largest_watched(
    step: Step, budget: int, is_free: bool, attempt: Callable[[Any, int], bool], peers: Peers
) -> int:
    """`largest_micro_batch` by steps that run, in all processes alike: the most rows that fit in
    each.

    Args:
        budget: of this process.
        is_free: it is the memory that is free, which may do for a row nevertheless.
        attempt: forward and backward of a batch in micro-batches of so many rows; whether it fitted
            in all processes.
    """
    rows = rows_of(step.who, step.batch)
    written: Written | None = None

    def over(size: int) -> int:
        nonlocal written
        fitted = True

        def run(_: int) -> None:
            nonlocal fitted
            batch = slice_of(step.batch, 0, min(2 * size, rows))
            fitted = attempt(batch, size)

        with unchanged(*step.roots, written=written) as before:
            peak = peak_of_step(step, run, size)
        written = written or before.written
        return peers.most(peak - budget if fitted else NEVER_FITS)

    size = search(over, 0, (2, 4), peers.most(rows))
    if not size and not is_free:
        raise _too_small(step, budget, lambda size: budget + over(size))
    return max(1, size)


def checked_budget(who: str, budget: object, model: nn.Module) -> int:
    """Return the budget in bytes. Raises TypeError or ValueError where not even the weights fit."""
    nbytes = as_bytes(f"{who}: budget", budget)
    weights = sum(storages(model.parameters()).values())
    if nbytes <= weights:
        needed, got = at_least(weights, nbytes)
        raise ValueError(
            f"{who}: budget must be above the {needed} of the model's weights, got {got}"
        )
    return nbytes


def _step(
    who: str,
    model: nn.Module,
    budget: int | str | None,
    loss: LossLike,
    function: StepFunction,
    optimizer: OptimizerLike,
    autocast: torch.dtype | None,
    limit: int,
) -> tuple[Step, int]:
    """A step without a batch, and the budget in bytes, of arguments that were checked."""
    check_module(who, model)
    check_function(who, function, loss, autocast)
    nbytes = checked_budget(who, budget, model)
    check_count(who, "limit", limit)
    made = as_optimizer(who, optimizer, asked_parameters(model, loss))
    return Step(model, None, made, loss, autocast, function=function, who=who), nbytes


def _largest(
    step: Step,
    batch: Batch,
    dim: int,
    budget: int,
    fates: Fates,
    device: str | torch.device | None,
    limit: int,
) -> int:
    target = target_of(step.who, step.model, device)
    peak = _predicted(fates, target)
    if callable(batch):

        def made(size: int) -> Any:
            found = batch(size)
            if isinstance(found, Iterator):  # a graph of torch_geometric can be called
                raise TypeError(
                    f"{step.who}: batch must be a batch, or a function of a size that returns one, "
                    f"got a {type(batch).__name__}, which returns a {type(found).__name__}"
                )
            return found

        return largest(step, made, budget, limit, peak)
    with (make := resized(batch, dim, step.who)):
        return largest(step, make, budget, limit, peak)


def largest_step(function: Callable[[int], object], budget: object, limit: int) -> int:
    """The most rows with which the function's peak, as measured, is within the budget."""
    allowed = as_bytes("largest_batch: budget", budget)
    check_count("largest_batch", "limit", limit)
    return search(lambda rows: peak_of(function, rows), allowed, (1, 2), limit)


def _predicted(fates: Fates, device: str) -> PeakOf:
    known: list[Fates] = []
    looks = Looks()

    def peak(step: Step) -> int:
        if not known:  # what can run in chunks is looked for once
            known.append(fates.with_rows(step))
        return predicted_trace(step, known[0], device, looks)[0].peak.total

    return peak
