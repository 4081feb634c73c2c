"""The largest size that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from memopt._progress import doing

NEVER_FITS = 1 << 62
"""Bytes of what does not run at all."""

TOO_SMALL = -NEVER_FITS
"""Bytes of a size that is below those that run: it counts as one that fits."""

# How many times as large the next size may be, and is where peaks do not grow.
_MOST_AT_ONCE = 16
_AT_ONCE_IF_FLAT = 4


def search(peak: Callable[[int], int], budget: int, first: Sequence[int], limit: int) -> int:
    """The largest size up to `limit` whose peak is within the budget; 0 if none is.

    Peaks grow with the size, about as one or two lines do: what the weights take is the peak for
    small sizes, what rows take for large ones. So the sizes tried first are `first`, then larger
    ones until one does not fit, then those where lines through two peaks meet the budget, and each
    third in the middle.
    """
    low, high, between = 0, limit + 1, 0
    known: dict[int, int] = {}
    sizes = [size for size in first if size <= limit]
    while high - low > 1:
        if sizes:
            size = sizes.pop(0)
        elif high > limit:
            size = _beyond(known, budget, low)
        else:
            between += 1
            size = _between(known, budget, low, high, between)
        size = min(max(size, low + 1), high - 1)
        doing(f"trying {size:,} rows, try")
        known[size] = peak(size)
        low, high = (size, high) if known[size] <= budget else (low, size)
    return low


def _beyond(known: dict[int, int], budget: int, low: int) -> int:
    """A size that may be the first one that does not fit. Far ones are slow, or run out of memory;
    and a line through small sizes, with the weights' peak, meets the budget anywhere.
    """
    met = _on_line(known, _fitting(known, budget), budget)
    if met is None or met < low:
        return max(1, _AT_ONCE_IF_FLAT * low)
    return min(met, _MOST_AT_ONCE * low)


def _between(known: dict[int, int], budget: int, low: int, high: int, attempt: int) -> int:
    """A size between the largest that fits and the smallest that does not.

    Where peaks grow ever faster, the line through these two meets the budget at a size that is too
    small, and a line through two on one side at one that is too large. These take turns.
    """
    middle = math.isqrt(low * high) if high > 4 * low > 0 else (low + high) // 2
    if attempt % 3 == 0:
        return middle
    fitting, others = _fitting(known, budget), _not_fitting(known, budget)
    beyond = [_on_line(known, fitting, budget), _on_line(known, others, budget)]
    beside = [size for size in beyond if size is not None and low <= size < high]
    chord = _on_line(known, [*fitting[-1:], *others[:1]], budget)
    if chord is None:
        return min(beside, default=middle)
    return max(chord, min(beside)) if beside and attempt % 3 == 2 else chord


def _fitting(known: dict[int, int], budget: int) -> list[int]:
    return sorted(size for size, found in known.items() if TOO_SMALL < found <= budget)[-2:]


def _not_fitting(known: dict[int, int], budget: int) -> list[int]:
    return sorted(size for size, found in known.items() if budget < found < NEVER_FITS)[:2]


def _on_line(known: dict[int, int], sizes: Sequence[int], budget: int) -> int | None:
    """The size at which the line through the peaks of two others meets the budget; None where it is
    flat, or there are no two.
    """
    if len(sizes) < 2 or known[sizes[0]] == known[sizes[1]]:
        return None
    one, other = sizes
    slope = (known[other] - known[one]) / (other - one)
    return math.floor(one + (budget - known[one]) / slope)
