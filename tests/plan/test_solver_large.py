"""Proves what holds of the solver's plans for whole models: they fit, peaks and times are monotone
in the budget, and where there are too many plans to tell all apart, they are within the grid's
bound of the best.
"""

from __future__ import annotations

import itertools
import random

import pytest

from memopt._extension import _C
from memopt._plan import solver
from memopt._plan.solver import (
    BelowFloor,
    LinkTimes,
    Option,
    Problem,
    Solution,
    Stage,
    evaluate,
    floor,
    solve,
)
from tests.plan.brute_force import NO_ROOM, all_plans
from tests.plan.support import plans_of

# Blocks of a transformer in units of their input (2h bytes a token): kept, with recipes, run again,
# both, and what of these leaves; a third of the time in forward.
UNIT = 67_108_864
SECONDS = 2.6e-3


def block_choice(held: float, again: float, off: float) -> Option:
    return Option(
        resident=int((held - off) * UNIT) + 4096,
        forward=16 * UNIT,
        backward=int((24 + off) * UNIT),
        forward_seconds=SECONDS,
        backward_seconds=2 * SECONDS + again * SECONDS,
        offloaded=int(off * UNIT),
    )


SIX = ((16, 0, 0), (10, 0.08, 0), (1, 1.0, 0), (1, 1.05, 0), (10, 0.08, 9), (1, 1.0, 1))
TWELVE = (
    *((16, 0, off) for off in (0, 4, 8, 15)),
    *((10, 0.08, off) for off in (0, 2.5, 5, 9.5)),
    *((1, 1.0, off) for off in (0, 0.25, 0.5, 1)),
)


def model(
    blocks: int, ways: tuple[tuple[float, float, float], ...], link: LinkTimes | None
) -> Problem:
    choices = tuple(block_choice(*way) for way in ways)
    gradients = UNIT // 2
    stages = (
        Stage((Option(UNIT, 2 * UNIT, 2 * UNIT, 1e-3, 1e-3),), blocks * gradients),
        *(Stage(choices, (blocks - i) * gradients) for i in range(blocks)),
        Stage((Option(2 * UNIT, 30 * UNIT, 40 * UNIT, 5e-3, 1e-2),)),
    )
    return Problem(stages, 20 * UNIT, blocks * UNIT, link)


LINK = LinkTimes(55e9, 55e9, in_flight=48 * UNIT)


def check_curve(plans: tuple[Solution, ...], problem: Problem) -> None:
    for one, next_one in itertools.pairwise(plans):
        assert one.peak < next_one.peak
        assert one.seconds > next_one.seconds
    for plan in plans:
        found = evaluate(problem, plan.choices)
        assert (found.peak, found.seconds) == (plan.peak, plan.seconds)
        assert plan.offloaded <= (problem.link or NO_ROOM).room


@pytest.mark.parametrize(
    ("ways", "link"), [(SIX[:4], None), (SIX, LINK)], ids=["kept", "offloaded"]
)
def test_ninety_six_blocks_are_solved_exactly(
    ways: tuple[tuple[float, float, float], ...], link: LinkTimes | None
) -> None:
    problem = model(96, ways, link)
    plans = plans_of(problem, 40)
    assert len(plans) == 40
    assert plans[0].grid == 0
    assert plans[0].labels < 4000
    check_curve(plans, problem)
    assert plans[0] == floor(problem)
    assert plans[-1].choices[1:-1] == (0,) * 96  # all kept


def test_ninety_six_blocks_with_twelve_choices() -> None:
    """Too many plans to tell all apart. Those found fit, are monotone, and the floor is exact."""
    problem = model(96, TWELVE, LINK)
    plans = plans_of(problem, 40)
    assert plans[-1].grid > 0
    check_curve(plans, problem)
    least = floor(problem)
    assert least.grid == 0
    assert least.peak <= floor(model(96, SIX, LINK)).peak
    with pytest.raises(BelowFloor):
        solve(problem, least.peak - 1)


def nearly_equal_plans(rng: random.Random) -> Problem:
    """The less a choice holds, the longer it takes. The bytes are a few sizes, and a little each: a
    fine grid takes many plans for one.
    """

    def choice(kept: int) -> Option:
        work, little = 2 * 10**6 + rng.randint(0, 60), rng.randint(0, 60)
        seconds = 1 + (3 - kept) / 4 + rng.randint(0, 3) / 64
        offloaded = rng.choice((0, 0, kept // 2 * 10**6))
        return Option(kept * 10**6 - offloaded + little, work, work, 1.0, seconds, offloaded)

    stages = tuple(Stage(tuple(choice(kept) for kept in (0, 1, 1, 2, 2, 3))) for _ in range(5))
    return Problem(stages, link=LinkTimes(2.0**20, 2.0**20, in_flight=3 * 10**6))


@pytest.mark.parametrize(("most_labels", "bound_means_something"), [(1, 0), (8, 0), (70, 100)])
def test_merging_on_a_grid_keeps_plans_within_its_bound(
    most_labels: int, bound_means_something: int
) -> None:
    """Where few labels are left, every plan found is a real one, none is missing at the floor, and
    none is further from the best than the grid says.
    """
    rng = random.Random(0)
    merged = bounded = 0
    for _ in range(12):
        problem = nearly_equal_plans(rng)
        link = problem.link or NO_ROOM
        chain = solver._chain(problem)
        front = chain.front(most_labels)
        if front.grid == 0:
            continue
        merged += 1
        plans = list(all_plans(problem))
        floor_is_exact = front.floor_grid == 0
        assert not floor_is_exact or front.floor == min(plan.peak for plan in plans)
        for budget in rng.sample(sorted({plan.peak for plan in plans}), 40):
            choices = front.within(budget)
            if choices is None:
                assert not floor_is_exact
                continue
            found = chain.evaluate(choices)
            assert found["peak"] <= budget
            # A label stands for others with less of what they hold: two grids at each stage.
            error = 2 * len(problem.stages) * front.grid
            within = [p.seconds for p in plans if p.peak <= budget - 3 * error]
            if within:
                bounded += 1
                assert found["seconds"] <= min(within) + error / link.out + error / link.back
    assert merged > 5
    assert bounded >= bound_means_something


def test_is_monotone_in_the_budget_on_a_grid() -> None:
    rng = random.Random(0)
    for _ in range(20):
        chain = solver._chain(nearly_equal_plans(rng))
        front = chain.front(10)
        assert front.grid > 0
        budgets = sorted(rng.randint(front.floor, front.fastest) for _ in range(30))
        found = [chain.evaluate(front.within(budget) or ()) for budget in budgets]
        assert [f["peak"] for f in found] == sorted(f["peak"] for f in found)
        assert [f["seconds"] for f in found] == sorted((f["seconds"] for f in found), reverse=True)


def test_is_asked_once_for_all_budgets() -> None:
    chain = _C.PlanChain(
        stages=[(0, [(1, 1, 1, 1.0, 1.0, 0)])], base=0, optimizer=0, link=(1.0, 1.0, 0, 0)
    )
    assert len(chain.front()) == 1
    problem = model(8, SIX, LINK)
    solver._front.cache_clear()
    solve(problem, 10**13)
    plans_of(problem, 5)
    floor(problem)
    assert solver._front.cache_info().misses == 1
