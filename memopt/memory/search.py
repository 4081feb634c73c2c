"""The largest size that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from memopt._progress import doing

NEVER_FITS = 1 << 62
"""Bytes of what does not run at all."""


def search(peak: Callable[[int], int], budget: int, first: Sequence[int], limit: int) -> int:
    """The largest size up to `limit` whose peak is within the budget; 0 if none is.

    Peaks grow with the size, about as a line does: so the sizes tried first are `first`, the next
    ones where the line through the two nearest peaks meets the budget, and each third the middle.
    """
    low, high = 0, limit + 1
    known: dict[int, int] = {}
    sizes = [size for size in first if size <= limit]
    while high - low > 1:
        if sizes:
            size = sizes.pop(0)
        elif len(known) % 3 == 2 and len(known) > 2:
            size = (low + high) // 2
        else:
            size = _on_line(known, budget)
        size = min(max(size, low + 1), high - 1)
        doing(f"trying {size:,} rows, try")
        known[size] = peak(size)
        low, high = (size, high) if known[size] <= budget else (low, size)
    return low


def _on_line(known: dict[int, int], budget: int) -> int:
    nearest = sorted(known, key=lambda size: abs(known[size] - budget))[:2]
    if len(nearest) < 2 or known[nearest[0]] == known[nearest[1]]:
        return 2 * max(known, default=1)
    one, other = nearest
    slope = (known[other] - known[one]) / (other - one)
    return math.floor(one + (budget - known[one]) / slope)
