"""Proves that the solver in Python finds what the native one finds, for plans that offload nothing:
by random problems, at every budget; and merged on a grid it still holds within its budget.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt import _C
from memopt._plan.solver import LinkTimes, Option, Problem, Stage, _numbers
from memopt._without_native.missing import NativeLibraryMissing
from memopt._without_native.plan import PlanChain
from tests.plan.brute_force import random_problem


def both(problem: Problem) -> tuple[_C.PlanChain, PlanChain]:
    stages = [
        (stage.before_backward, [_numbers("", choice) for choice in stage.choices])
        for stage in problem.stages
    ]
    link = problem.link or LinkTimes(1.0, 1.0, room=0)
    asked = {
        "stages": stages,
        "base": problem.base,
        "optimizer": problem.optimizer,
        "link": (link.out, link.back, 0, link.in_flight),
    }
    return _C.PlanChain(**asked), PlanChain(**asked)


def without_offload(problem: Problem) -> Problem:
    stages = (
        replace(stage, choices=tuple(replace(choice, offloaded=0) for choice in stage.choices))
        for stage in problem.stages
    )
    return replace(problem, stages=tuple(stages))


@given(seed=st.integers(0, 2**32))
def test_equals_the_native_solver(seed: int) -> None:
    rng = random.Random(seed)
    native, python = both(without_offload(random_problem(rng)))
    fronts = native.front(), python.front()
    assert fronts[0].floor == fronts[1].floor
    assert fronts[0].fastest == fronts[1].fastest
    budgets = {fronts[0].floor - 1, fronts[0].floor, fronts[0].fastest}
    budgets |= {rng.randint(fronts[0].floor, fronts[0].fastest) for _ in range(5)}
    for budget in budgets:
        expected, found = (front.within(budget) for front in fronts)
        if expected is None:
            assert found is None
            continue
        mine = python.evaluate(found)
        assert native.evaluate(found) == {**mine, "seconds": pytest.approx(mine["seconds"])}
        for number in ("seconds", "peak"):
            assert python.evaluate(found)[number] == pytest.approx(
                native.evaluate(expected)[number], rel=1e-9
            )


def test_on_a_grid_the_floor_is_exact_and_plans_are_within_their_budgets() -> None:
    rng = random.Random(0)

    def option() -> Option:
        return Option(*(rng.randrange(1, 10**6) for _ in range(3)), rng.random(), rng.random())

    stages = tuple(Stage(tuple(option() for _ in range(4))) for _ in range(8))
    _, python = both(Problem(stages))
    exact, merged = python.front(), python.front(most_labels=8)
    assert exact.grid == 0 < merged.grid
    assert exact.floor == merged.floor
    for budget in (rng.randint(exact.floor, exact.fastest) for _ in range(20)):
        found = python.evaluate(merged.within(budget) or ())
        assert found["peak"] <= budget
        assert found["seconds"] >= python.evaluate(exact.within(budget) or ())["seconds"]


def test_refuses_by_name() -> None:
    chain = both(without_offload(random_problem(random.Random(1))))[1]
    with pytest.raises(ValueError, match="choices must be one for each"):
        chain.evaluate([])
    fields = (1, 2, 3, 1.0, 1.0)
    link = (1.0, 1.0, 0, 0)
    with pytest.raises(NativeLibraryMissing, match=r"memopt\.plan\(offload=\)"):
        PlanChain(stages=[(0, [(*fields, 8)])], base=0, optimizer=0, link=link)
    with pytest.raises(ValueError, match="stage 0, choice 0: resident must be at least 0"):
        PlanChain(stages=[(0, [(-1, 2, 3, 1.0, 1.0, 0)])], base=0, optimizer=0, link=link)
    for stages, words in (([], "stages must have"), ([(0, [])], "stage 0 must have a choice")):
        with pytest.raises(ValueError, match=words):
            PlanChain(stages=stages, base=0, optimizer=0, link=link)
