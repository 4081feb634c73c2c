"""`memopt.fit`: the largest micro-batch, and the plan for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from memopt._accumulate import Accumulated, accumulate
from memopt._accumulate.weight import Weight, counter, total_of
from memopt._errors import in_the_name_of, warn
from memopt._plan import ranks
from memopt._plan.api import live_of, plan
from memopt._plan.largest import Larger, sizes_that_fit
from memopt._plan.least import least_peak, least_plans, plain_least_plan
from memopt._plan.live import BlocksLike, Live
from memopt._plan.plan import Plan
from memopt._plan.terms import Terms
from memopt._progress import progress
from memopt.assignment import Assignment
from memopt.memory.batches import rows_of, slice_of
from memopt.memory.leaves import all_tensors, as_dict
from memopt.memory.lists import check_cut
from memopt.memory.predicted.fits import PeakOf, largest_part, peak_with_part, step_with_part
from memopt.memory.search import NEVER_FITS
from memopt.memory.sizes import BudgetTooSmall, Size, as_bytes, as_text, at_least
from memopt.memory.step import LossLike, StepFunction
from memopt.show.sections import Tables
from memopt.show.shown import Shown


@dataclass(frozen=True, repr=False)
class Fitted(Shown):
    """A model with a plan on it, and how many rows to run at a time. Call it with a batch, or
    `print` it.
    """

    model: nn.Module
    plan: Plan
    micro_batch: int
    """Rows of a micro-batch."""
    micro_batches: int
    """How many the sample has of them."""
    batch_bytes: int
    """The sample's, which the budget has room for."""
    _options: dict[str, Any]

    def __repr__(self) -> str:
        return (
            f"Fitted({type(self.model).__name__}, micro_batch={self.micro_batch}, "
            f"micro_batches={self.micro_batches}, peak={self.plan.peak}, "
            f"budget={self.plan.budget})"
        )

    def tables(self) -> Tables:
        """The plan's, and how the batch is split."""
        report = self.plan.tables()
        many = f", {self.micro_batches} for a batch" if self.micro_batches > 1 else ""
        title, *more = report.title.split("\n")
        split = f"micro-batches of {self.micro_batch} rows{many}"
        return report._replace(title="\n".join((title, split, *more)))

    @in_the_name_of("Fitted", "accumulate")
    def __call__(self, batch: Any) -> Accumulated:
        """Forward and backward of a batch, in micro-batches; the gradients are those of the whole.
        See `memopt.accumulate`. The optimizer's step is yours. A batch of more bytes than the one
        that was planned with is warned of.
        """
        nbytes = _bytes_of(batch)
        if nbytes > self.batch_bytes:
            warn(
                "Fitted: a batch must be no larger than the one that was planned with, "
                f"{as_text(self.batch_bytes)}, got {as_text(nbytes)}: its step may take more than "
                "the budget"
            )
        return accumulate(self.model, batch, micro_batch=self.micro_batch, **self._options)

    def undo(self) -> None:
        """Take the plan off the model."""
        self.plan.undo()


@in_the_name_of("fit", "accumulate", "plan", "assign", "convert", "checkpoint_wrapper")
@progress("memopt.fit")
def fit(
    model: nn.Module,
    batch: Any,
    budget: int | str,
    *,
    optimizer: torch.optim.Optimizer,
    loss: LossLike = None,
    step: StepFunction = None,
    weight: Weight = "rows",
    blocks: BlocksLike = None,
    autocast: torch.dtype | None = None,
    steps: int = 3,
) -> Fitted:
    """Have a model train with batches like `batch` within a budget of bytes: the largest
    micro-batch that any plan fits, the plan for it (see `memopt.plan`), on the model, and
    accumulation that keeps the gradients those of the whole batch.

        fitted = memopt.fit(model, batch, "40GiB", optimizer=optimizer)
        for batch in batches:
            loss = fitted(batch).loss
            optimizer.step()
            optimizer.zero_grad()

    The rows are shared among as few micro-batches as there can be.

    Args:
        model: changed in place; `Fitted.undo` gives it back. With values.
        batch: of the size that training has. It is not held: what `Fitted.plan` predicts later is
            predicted without its values.
        budget: for all of a step's memory. Bytes or a string, such as "40GiB".
        optimizer: the one that trains the model's parameters.
        loss, step, autocast: see `memopt.plan`.
        weight: see `memopt.accumulate`.
        blocks, steps: see `memopt.plan`.

    Raises:
        BudgetTooSmall: a ValueError: one row does not fit.
        TypeError, ValueError: as `memopt.plan` and `memopt.accumulate`. The model is as before.
    """
    wanted = as_bytes("fit: budget", budget)
    batch = as_dict(batch)
    check_cut("fit", batch)
    rows = rows_of("fit", batch)
    count = counter(weight, "labels", -100)
    live = live_of(model, batch, optimizer, loss, blocks, autocast, step=step)
    if live.runs:
        total_of(count, batch)
    live.probe()
    options: dict[str, Any] = {
        "optimizer": optimizer,
        "loss": loss,
        "step": step,
        "blocks": blocks,
        "autocast": autocast,
    }
    sizes = sorted({*_sizes(live, wanted)} - {0}, reverse=True)
    for most in sizes:
        number = -(-rows // most)
        size = -(-rows // number)
        try:
            chosen = plan(
                model,
                slice_of(batch, 0, min(2 * size, rows)),
                wanted,
                **options,
                micro_batches=1 if number == 1 else 2,
                steps=steps,
            )
        except BudgetTooSmall:
            if most == sizes[-1]:
                raise
            continue  # fewer rows fit with a plan that is simpler to find
        chosen.apply()
        of_batches = {"loss": loss, "step": step, "weight": weight, "autocast": autocast}
        return Fitted(model, chosen, size, number, _bytes_of(batch), of_batches)
    raise _too_small(live, wanted, options)


def _sizes(live: Live, wanted: Size) -> list[int]:
    """Return ever more rows of a micro-batch, for which some plan is found; 0: none was."""
    step = live.step
    rows = rows_of("fit", step.batch)

    def largest_with(plans: Sequence[Assignment]) -> int:
        return ranks.least(largest_part(step, wanted, peak_of(plans)))

    def peak_of(plans: Sequence[Assignment]) -> PeakOf:
        return partial(least_peak, live, terms=Terms(), plans=plans)

    def larger(size: int) -> Larger | None:
        simplest = peak_of([plain_least_plan(live)])
        for more in _more_than(size, rows):
            if more == rows or peak_with_part(step, more, simplest) < NEVER_FITS:
                asked, rest = step_with_part(step, more)
                return Larger(more, asked, wanted - rest)
        return None

    return sizes_that_fit(live, Terms(), largest_with, larger)


def _more_than(size: int, rows: int) -> Iterator[int]:
    """The next sizes of micro-batches, each for fewer of them than the one before; behind 0 those
    of 1, 2, 4 rows and so on, and all.
    """
    if size:
        yield from (-(-rows // number) for number in range(-(-rows // size) - 1, 0, -1))
        return
    size = 1
    while 2 * size <= rows:
        yield size
        size *= 2
    yield rows


def _bytes_of(batch: Any) -> int:
    return sum(tensor.nbytes for tensor in all_tensors(as_dict(batch)))


def _too_small(live: Live, wanted: Size, options: Mapping[str, Any]) -> BudgetTooSmall:
    """The error where no micro-batch fits: what one takes of as few rows as the model does, of 1,
    2, 4 and so on.

    Args:
        options: of `plan`, which says more of a budget below its floor.
    """
    rows, size = rows_of("fit", live.step.batch), 1
    refused: Exception | None = None
    while size == 1 or 2 * size <= rows:
        step, rest = step_with_part(live.step, size)
        room = max(1, wanted - rest)
        of_plan: BudgetTooSmall | None = None
        try:
            parts = step.micro_batches
            plan(step.model, step.batch, room, micro_batches=parts, measure=False, **options)
        except BudgetTooSmall as error:
            of_plan = error
        except Exception as error:
            refused, size = refused or error, 2 * size
            continue
        if of_plan is not None and not rest:
            return of_plan
        least = least_peak(live, step, Terms(), least_plans(live))
        floor = rest + (least if of_plan is None else of_plan.floor)
        needed, got = at_least(floor, wanted)
        found = BudgetTooSmall(
            f"fit: budget must be at least {needed}, the floor, got {got}, for micro-batches of "
            f"{size} row{'s' * (size > 1)} beside the whole batch",
            floor,
        )
        found.__cause__ = of_plan
        return found
    whole = BudgetTooSmall(
        f"fit: budget must hold a step of the whole batch where the model takes no fewer rows, got "
        f"{as_text(wanted)}; with fewer it raises {type(refused).__name__}: {refused}",
        least_peak(live, step_with_part(live.step, rows)[0], Terms(), least_plans(live)),
    )
    whole.__cause__ = refused
    return whole
