"""`memopt.fit`: the largest micro-batch, and the plan for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from memopt._accumulate import Accumulated, accumulate
from memopt._accumulate.weight import Weight
from memopt._errors import in_the_name_of
from memopt._plan import ranks
from memopt._plan.api import live_of, plan
from memopt._plan.choose import BudgetTooSmall
from memopt._plan.least import least_peak
from memopt._plan.live import BlocksLike
from memopt._plan.plan import Plan
from memopt._plan.terms import Terms
from memopt._progress import progress
from memopt.memory.batches import as_dict, rows_of, slice_of
from memopt.memory.predicted.fits import largest_part
from memopt.memory.sizes import as_bytes, as_text
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
        See `memopt.accumulate`. The optimizer's step is yours.
        """
        return accumulate(self.model, batch, micro_batch=self.micro_batch, **self._options)

    def undo(self) -> None:
        """Take the plan off the model."""
        self.plan.undo()


@in_the_name_of("memopt.fit", "memopt.plan", "assign", "convert", "checkpoint_wrapper")
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

    The rows are shared evenly among as few micro-batches as there can be.

    Args:
        model: changed in place; `Fitted.undo` gives it back. With values.
        batch: of the size that training has.
        budget: for all of a step's memory. Bytes or a string, such as "40GiB".
        optimizer: the one that trains the model's parameters.
        loss, step, autocast: see `memopt.plan`.
        weight: see `memopt.accumulate`.
        blocks, steps: see `memopt.plan`.

    Raises:
        BudgetTooSmall: a ValueError: one row does not fit.
        TypeError, ValueError: as `memopt.plan` and `memopt.accumulate`. The model is as before.
    """
    wanted = as_bytes("memopt.fit: budget", budget)
    batch = as_dict(batch)
    rows = rows_of("memopt.fit", batch)
    live = live_of(model, batch, optimizer, loss, blocks, autocast, step=step)
    live.probe()
    most = ranks.least(largest_part(live.step, wanted, partial(least_peak, live, terms=Terms())))
    if most == 0:
        sample, parts = slice_of(batch, 0, min(2, rows)), min(2, rows)
        try:
            with in_the_name_of("memopt.fit", "memopt.plan"):  # it raises, and says why
                plan(
                    model,
                    sample,
                    wanted,
                    optimizer=optimizer,
                    loss=loss,
                    step=step,
                    blocks=blocks,
                    autocast=autocast,
                    micro_batches=parts,
                    measure=False,
                )
        except BudgetTooSmall:
            raise
        except Exception as error:
            raise BudgetTooSmall(
                f"memopt.fit: budget must hold a step of the whole batch where the model takes no "
                f"fewer rows, got {as_text(wanted)}; with fewer it raises "
                f"{type(error).__name__}: {error}",
                wanted,
            ) from error
        raise BudgetTooSmall(
            f"memopt.fit: budget must hold a step of one row, got {as_text(wanted)}", wanted
        )
    count = -(-rows // most)
    size = -(-rows // count)
    chosen = plan(
        model,
        slice_of(batch, 0, min(2 * size, rows)),
        wanted,
        optimizer=optimizer,
        loss=loss,
        step=step,
        blocks=blocks,
        autocast=autocast,
        micro_batches=1 if count == 1 else 2,
        steps=steps,
    )
    chosen.apply()
    options = {"loss": loss, "step": step, "weight": weight, "autocast": autocast}
    return Fitted(model, chosen, size, count, options)
