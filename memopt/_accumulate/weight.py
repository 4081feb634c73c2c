"""The weight with which the loss of a micro-batch counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from torch import Tensor

from memopt._errors import warn
from memopt.memory.batches import counts_of_rows, rows_of
from memopt.memory.cuts import cuts
from memopt.memory.leaves import entries_of_record
from memopt.memory.lists import list_of_numbers

Weight = Literal["rows", "sum", "tokens", "next tokens"] | Callable[[Any], float]


# What transformers' Trainer gives a model: by how much its loss, a sum, is divided.
_DIVISOR = "num_items_in_batch"


def warn_if_not_rows(batch: Any, size: int, ignore_index: int) -> None:
    """Warns where a batch shows that a mean of its rows' losses may not be its loss: its rows have
    different numbers of targets, and micro-batches of `size` rows different numbers a row.
    """
    if isinstance(batch, Mapping) and batch.get(_DIVISOR) is not None:
        _warn(f'the batch has {_DIVISOR!r}, by which a sum is divided: weight="sum" is for that')
        return
    if path := list_of_numbers(batch):
        _warn(f"{path}, a list with a number for each row, goes whole to every micro-batch")
        return
    for path, counts in counts_of_rows(batch, ignore_index).items():
        parts = [counts[start:end] for start, end in cuts(len(counts), size)]
        if len({sum(part) / len(part) for part in parts}) > 1:
            numbers = ", ".join(str(sum(part)) for part in parts[:4])
            _warn(
                f"{path} has {numbers}{', ...' if len(parts) > 4 else ''} entries that count in "
                "its micro-batches. If the loss is a mean of such entries, gradients are those of "
                'the whole batch with weight="tokens", for transformers\' causal models with '
                'weight="next tokens", or with a function that counts them'
            )
            return


def _warn(why: str) -> None:
    warn(
        "accumulate: each micro-batch counts by its rows, which is right where the loss is a mean "
        f'of rows; but {why}. weight="rows" says that rows are meant'
    )


def counter(weight: Weight | None, labels: str, ignore_index: int) -> Callable[[Any], float] | None:
    """Counts what the loss of a part is a mean of; None where it is a sum."""
    if not isinstance(labels, str):
        raise TypeError(f"accumulate: labels must be a key of the batch, a str, got {labels!r}")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"accumulate: ignore_index must be an int, got {ignore_index!r}")
    if weight == "sum":
        return None
    if weight is None or weight == "rows":
        return lambda part: rows_of("accumulate", part)
    if weight in ("tokens", "next tokens"):
        first = 1 if weight == "next tokens" else 0

        def count(part: Any) -> float:
            found = (
                part.get(labels) if isinstance(part, dict) else entries_of_record(part).get(labels)
            )
            if not isinstance(found, Tensor):
                raise TypeError(
                    f'accumulate: weight="{weight}" must have a batch that maps {labels!r} to a '
                    f"tensor, got {type(part).__name__}"
                )
            if first and found.dim() < 2:
                raise ValueError(
                    'accumulate: weight="next tokens" must have labels of rows and tokens, got '
                    f'shape {list(found.shape)}; weight="tokens" counts one label for each row'
                )
            counted = found[:, first:] if first else found
            return float((counted != ignore_index).sum())

        return count
    if not callable(weight):
        raise ValueError(
            'accumulate: weight must be "rows", "sum", "tokens", "next tokens" or a function of a '
            f"micro-batch, got {weight!r}"
        )
    return partial(_counted_by, weight)


def _counted_by(weight: Callable[[Any], float], part: Any) -> float:
    """The number that a function of the user's counts."""
    found = weight(part)
    try:
        number = float(found)
    except (TypeError, ValueError, RuntimeError):  # of a tensor of several
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(
            "accumulate: weight must return a number of at least 0 for a micro-batch, got "
            f"{found!r}"
        )
    return number


def total_of(count: Callable[[Any], float] | None, batch: Any) -> float:
    """The number that the whole batch counts; of a sum 1.

    Raises:
        ValueError: nothing.
    """
    total = 1.0 if count is None else float(count(batch))
    if total <= 0:
        raise ValueError(
            "accumulate: weight must count something in the batch, got 0: are all labels ignored?"
        )
    return total


def warn_if_not_whole(total_of_shares: float) -> None:
    """Warns where the micro-batches of a batch have counted more, or less, than the whole of it."""
    if abs(total_of_shares - 1) > 1e-3:
        warn(
            "accumulate: weight must count so that the micro-batches of a batch add up to it, got "
            f"counts of {total_of_shares:.4g} times the batch's, and gradients as much larger"
        )


def warn_of_a_step_inside() -> None:
    """Warns where an optimizer has stepped in the backward of a micro-batch."""
    warn(
        "accumulate: weights must stay as they are until the last micro-batch of a batch, got ones "
        "that a micro-batch has written, as an optimizer does that steps in backward, in hooks of "
        "parameters: each micro-batch is a step of its own then"
    )
