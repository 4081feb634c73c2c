"""Proves: the selections of support/selection.py leave out no pair of values, and what `make test`
leaves out by name is there.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support import map as tests_map
from tests.support.cases import OP_CASES
from tests.support.selection import each_value, every_op_with, pairwise
from tests.support.shapes import COLS, DTYPES, ROWS

TESTS = Path(__file__).parent
LISTS = [(COLS, DTYPES, ROWS), (ROWS, COLS, DTYPES), ("ab", "cde"), ("ab", "cd", "ef", "gh")]


def pairs(combinations: Iterable[tuple]) -> set[tuple]:
    """(place, value, other place, other value)."""
    places = [list(itertools.combinations(enumerate(c), 2)) for c in combinations]
    return {(*first, *second) for pairs in places for first, second in pairs}


@pytest.mark.parametrize("lists", LISTS)
def test_pairwise_has_all_pairs_in_few_combinations(lists: tuple) -> None:
    everything = list(itertools.product(*lists))
    chosen = pairwise(*lists)
    assert pairs(chosen) == pairs(everything)
    assert len(set(chosen)) == len(chosen)
    assert len(chosen) < len(everything) or len(lists) == 2


@pytest.mark.parametrize(
    "lists", [(COLS, DTYPES, ROWS), (DTYPES, ROWS, COLS), ("abcdef", "gh", "ij")]
)
def test_each_value_has_each_value_and_in_turns_all_pairs(lists: tuple) -> None:
    count = math.prod(len(values) for values in lists[1:])
    turns = [each_value(*lists, turn=turn) for turn in range(count)]
    for chosen in turns:
        for place, values in enumerate(lists):
            assert {combination[place] for combination in chosen} == set(values)
    assert pairs(itertools.chain(*turns)) == pairs(itertools.product(*lists))


def test_elementwise_ops_together_have_all_pairs_and_the_others_each() -> None:
    lists = {"cols": COLS, "dtypes": DTYPES, "rows": ROWS}
    parameters = [p.values for p in every_op_with(OP_CASES, **lists).args[1]]
    assert {case for case, *_ in parameters} == set(OP_CASES)
    everything = pairs(itertools.product(*lists.values()))
    elementwise = [values for case, *values in parameters if case.elementwise]
    assert pairs(elementwise) == everything
    for case in OP_CASES:
        if not case.elementwise:
            assert pairs(values for c, *values in parameters if c is case) == everything, case


@pytest.mark.parametrize("name", ["slow.txt", "thorough.txt"])
def test_every_test_that_a_list_names_is_there(name: str) -> None:
    """A name that no test bears any more would be a test that is left out by nobody."""
    by_path = name == "thorough.txt"
    there = {
        f"{file.relative_to(TESTS) if by_path else file.name}::{test}"
        for file in TESTS.rglob("test_*.py")
        for test in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    lines = [line for line in (TESTS / name).read_text().splitlines() if line[0] != "#"]
    assert [line for line in lines if line.split()[0] not in there] == []
    assert lines == sorted(set(lines))


def test_the_map_of_the_tests_is_that_of_the_files() -> None:
    """`python -m tests.support.map` writes it."""
    assert tests_map.README.read_text() == tests_map.page()
