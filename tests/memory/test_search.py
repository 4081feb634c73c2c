"""Proves: the search finds the largest size that fits, whatever peaks do, in few tries: each is a
prediction of seconds.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memopt.memory.search import NEVER_FITS, TOO_SMALL, search

LIMIT = 1 << 16

CURVES: dict[str, tuple[Callable[[int], int], int]] = {
    # What the weights take, and each row.
    "a line": (lambda size: 10_000_000 + 36_000 * size, 8),
    # The optimizer's step is the peak for few rows, which then take a little, or nothing.
    "two lines": (lambda size: max(10_000_000 + 3 * size, 2_000_000 + 200_000 * size), 9),
    "a floor": (lambda size: max(10_000_000, 2_000_000 + 200_000 * size), 9),
    # Attention's scores.
    "a square": (lambda size: 10_000_000 + 36_000 * size + 500 * size * size, 13),
    "a square above a floor": (
        lambda size: max(10_000_000 + 8 * size, 5_000_000 + 36_000 * size + 500 * size * size),
        14,
    ),
    # Lengths that are padded.
    "steps": (lambda size: 10_000_000 + 36_000 * (-(-size // 8) * 8), 10),
    "wide steps": (lambda size: 10_000_000 + 36_000 * (-(-size // 64) * 64), 10),
    # What a machine does not hold, and what a model does not take.
    "an end": (lambda size: 10_000_000 + 36_000 * size if size < 700 else NEVER_FITS, 10),
    "a beginning": (lambda size: TOO_SMALL if size < 7 else 36_000 * size, 9),
    "below nothing": (lambda size: 36_000 * size - 10_000_000, 8),
}


@pytest.mark.parametrize("most", [1, 2, 3, 7, 12, 40, 100, 333, 1000, 5000, 60_000])
@pytest.mark.parametrize("name", list(CURVES))
@pytest.mark.parametrize("first", [(1, 16), (1, 2), (2, 4)], ids=str)
def test_few_tries(name: str, most: int, first: tuple[int, int]) -> None:
    curve, tries = CURVES[name]
    budget = min(curve(most), curve(699) if name == "an end" else NEVER_FITS) + 1
    tried: list[int] = []

    def peak(size: int) -> int:
        tried.append(size)
        return curve(size)

    found = search(peak, budget, first, LIMIT)
    assert curve(found) <= budget
    assert found == LIMIT or curve(found + 1) > budget
    assert len(set(tried)) == len(tried)
    if first == (1, 16):
        assert len(tried) <= tries


def test_no_size_is_far_beyond_what_fits() -> None:
    """The peaks of small sizes say next to nothing; a far larger step is slow, or runs out."""
    tried: list[int] = []

    def peak(size: int) -> int:
        tried.append(size)
        return max(10_000_000 + 3 * size, 2_000_000 + 200_000 * size)

    assert search(peak, 10_000_000 + 1000, (1, 2), LIMIT) == 40
    assert max(tried) <= 16 * 40


def test_where_nothing_fits() -> None:
    assert search(lambda size: size, 0, (1, 16), LIMIT) == 0
    assert search(lambda size: size, 1, (2, 4), LIMIT) == 1
    assert search(lambda size: size, 99, (1, 16), 0) == 0
