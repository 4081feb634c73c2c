"""The weight with which the loss of a micro-batch counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from memopt.memory.batches import rows_of

Weight = Literal["rows", "sum", "tokens", "next tokens"] | Callable[[Any], float]


def counter(weight: Weight, labels: str, ignore_index: int) -> Callable[[Any], float] | None:
    """Counts what the loss of a part is a mean of; None where it is a sum."""
    if weight == "sum":
        return None
    if weight == "rows":
        return lambda part: rows_of("accumulate", part)
    if weight in ("tokens", "next tokens"):
        first = 1 if weight == "next tokens" else 0

        def count(part: Any) -> float:
            found = part.get(labels) if isinstance(part, dict) else None
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
    return weight
