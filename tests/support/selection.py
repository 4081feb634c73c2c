"""Which of many combinations to test.

Most mistakes need one value, or two values together: of columns and dtype, of layout and dtype. A
test that crosses all lists runs hundreds of times to see what some dozens of runs show.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from .cases import OpCase


def pairwise(*lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations, one value of each list, in which every two values of different lists meet.

    Greedy: of all combinations the one with most new pairs, the first of equal ones. The same in
    every run. Two lists are crossed in full.
    """
    places = list(itertools.combinations(range(len(lists)), 2))
    # Positions stand for the values, which need not be hashable.
    everything = list(itertools.product(*(range(len(values)) for values in lists)))
    missing = {(i, j, c[i], c[j]) for c in everything for i, j in places}
    chosen = []
    while missing:
        best, new = everything[0], set()
        for candidate in everything:
            pairs = {(i, j, candidate[i], candidate[j]) for i, j in places} & missing
            if len(pairs) > len(new):
                best, new = candidate, pairs
        missing -= new
        chosen.append(tuple(values[k] for values, k in zip(lists, best, strict=True)))
    return chosen


def each_value(*lists: Sequence[Any], turn: int = 0) -> list[tuple[Any, ...]]:
    """As many combinations as the longest list has values, so that each value of each list occurs.

    In turns 0, 1, 2 and so on other values meet: all lists but the first are shifted against each
    other in every way, like the digits of a counter, after as many turns as the product of their
    lengths.
    """
    length = max(len(values) for values in lists)
    shifts = [0]
    for values in lists[1:]:
        shifts.append(turn % len(values))
        turn //= len(values)
    return [
        tuple(values[(k + by) % len(values)] for values, by in zip(lists, shifts, strict=True))
        for k in range(length)
    ]


def is_one_in(number: int, name: str) -> bool:
    """Whether it is one of the names, one in so many, that `make test-full` runs. Chosen by the
    name, so that one that is added changes no other's choice.
    """
    return zlib.crc32(name.encode()) % number == 0


def every_op_with(cases: Iterable[OpCase], **lists: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by `case` and by a selection from the named lists.

    Ops that see rows get every pair of values: those that together have every value once, and the
    others as slow tests. Of elementwise ops, whose kernels see nothing but a number of elements,
    each gets every value, and all of them together every pair.
    """
    parameters = []
    for turn, case in enumerate(cases):
        chosen = each_value(*lists.values(), turn=turn)
        more = [] if case.elementwise else [c for c in pairwise(*lists.values()) if c not in chosen]
        for values in (*chosen, *more):
            name = "-".join(map(str, (*values, case)))
            marks = [pytest.mark.slow] if values in more else []
            parameters.append(pytest.param(case, *values, id=name, marks=marks))
    return pytest.mark.parametrize(("case", *lists), parameters)
