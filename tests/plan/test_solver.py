"""Proves that the planner's solver finds the best plan: by brute force over all plans, with
formulas of its own, on thousands of small problems; each formula by hand; and that it refuses by
name what cannot be.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt._plan.solver import (
    BelowFloor,
    LinkTimes,
    Option,
    Problem,
    Stage,
    evaluate,
    floor,
    solve,
)
from tests.plan.brute_force import all_plans, random_problem


def check_against_brute_force(problem: Problem, rng: random.Random) -> None:
    plans = list(all_plans(problem))
    least = min(plan.peak for plan in plans)
    found = floor(problem)
    assert found.peak == least
    assert found.seconds == min(plan.seconds for plan in plans if plan.peak == least)
    with pytest.raises(BelowFloor) as error:
        solve(problem, least - 1)
    assert error.value.floor == least
    assert error.value.solution == found
    for budget in {least, *(rng.choice(plans).peak for _ in range(5)), 10**9}:
        expected = min((p.seconds, p.peak) for p in plans if p.peak <= budget)
        solution = solve(problem, budget)
        assert solution.grid == 0
        assert (solution.seconds, solution.peak) == expected
        chosen = next(plan for plan in plans if plan.choices == solution.choices)
        assert (chosen.seconds, chosen.peak, chosen.offloaded) == (*expected, solution.offloaded)


@pytest.mark.parametrize("part", range(4))
def test_equals_brute_force(part: int) -> None:
    rng = random.Random(part)
    for _ in range(500):
        check_against_brute_force(random_problem(rng), rng)


@given(seed=st.integers(0, 2**32))
def test_seconds_that_are_no_exact_sums(seed: int) -> None:
    """A plan takes as long as by brute force, within rounding."""
    rng = random.Random(seed)
    problem = random_problem(rng)
    factor = rng.uniform(1e-9, 1e3)

    def scaled(choice: Option) -> Option:
        return replace(
            choice,
            forward_seconds=choice.forward_seconds * factor,
            backward_seconds=choice.backward_seconds * factor,
        )

    stages = tuple(replace(s, choices=tuple(map(scaled, s.choices))) for s in problem.stages)
    problem = replace(problem, stages=stages)
    plans = list(all_plans(problem))
    for budget in {rng.choice(plans).peak for _ in range(4)}:
        solution = solve(problem, budget)
        expected = min(plan.seconds for plan in plans if plan.peak <= budget)
        assert solution.peak <= budget
        assert solution.seconds == pytest.approx(expected, rel=1e-12)


def test_equal_plans_differ_in_what_the_next_stage_sees() -> None:
    """Two ways of the first stage leave the same behind; what one has offloaded returns in the
    backward of the second, above the budget there, and in time only if that is slow.
    """
    first = Stage((Option(5, 5, 5, 1, 1), Option(5, 5, 5, 0.5, 1, offloaded=8)))
    slow, quick = Option(0, 0, 10, 0, 4), Option(0, 0, 10, 0, 2)
    link = LinkTimes(out=100, back=2)
    problem = Problem((first, Stage((slow,))), link=link)
    assert solve(problem, 23).choices == (1, 0)
    assert solve(problem, 22).choices == (0, 0)
    # The quick backward does not hide the return: 0.5 s less, and 2 s to wait.
    problem = Problem((first, Stage((quick,))), link=link)
    assert solve(problem, 100).choices == (0, 0)
    assert evaluate(problem, (1, 0)).backward_waits == (2.0, 0.0)


def test_timeline_by_hand() -> None:
    """Every formula once, by numbers worked out on paper."""
    stages = (
        Stage((Option(10, 20, 30, 1, 2, offloaded=16),), before_backward=7),
        Stage((Option(3, 25, 12, 2, 3, offloaded=40),), before_backward=4),
        Stage((Option(0, 1, 2, 0.5, 1),)),
    )
    found = evaluate(Problem(stages, 100, 60, LinkTimes(8, 4, 1000, 20)), (0, 0, 0))
    # On the way out: 0, 16 - 8 = 8, 8 + 40 - 16 = 32 of which 12 are waited for, 20 - 4 = 16.
    assert found.forward_peaks == (120, 100 + 10 + 8 + 25, 100 + 13 + 20 + 1)
    assert found.forward_waits == (0, 12 / 8, 0)
    assert found.backward_peaks == (
        100 + 8 + 30 + 7,
        100 + 10 + 20 + 16 + 12 + 4,
        100 + 13 + 16 + 40 + 2,
    )
    assert found.backward_waits == (16 / 4 - 3, 40 / 4 - 1, 0)
    assert found.optimizer_peak == 160
    assert (found.peak, found.peak_at) == (171, ("backward", 2))
    assert found.wait_seconds == 1.5 + 1 + 9
    assert found.seconds == 1 + 2 + 2 + 3 + 0.5 + 1 + found.wait_seconds
    assert found.offloaded == 56


def test_where_the_peak_is() -> None:
    stage = Stage((Option(2, 9, 5),))
    assert floor(Problem((stage,))).peak_at == ("forward", 0)
    assert floor(Problem((stage, stage))).peak_at == ("forward", 1)
    assert floor(Problem((Stage((Option(2, 2, 5),)), stage), 0, 30)).peak_at == ("optimizer", None)
    with pytest.raises(
        BelowFloor, match=r"budget of 10 bytes: the least is 11, in forward of stage 1"
    ):
        solve(Problem((stage, stage)), 10)
    with pytest.raises(BelowFloor, match="the least is 30, in optimizer"):
        solve(Problem((stage, stage), 0, 30), 29)


def test_petabytes() -> None:
    unit = 10**15
    stage = Stage((Option(unit, unit, 2 * unit, 1, 2), Option(1, unit, 2 * unit, 1, 3)))
    problem = Problem((stage,) * 96, 3 * unit, 5 * unit)
    best = solve(problem, 10**18)
    assert (best.peak, best.seconds) == (3 * unit + 95 * unit + 2 * unit, 96 * 3)
    tight = solve(problem, 12 * unit)
    assert tight.peak <= 12 * unit
    assert tight.seconds == 96 * 3 + 96 - sum(c == 0 for c in tight.choices)


def test_a_room_too_small_for_all() -> None:
    """It is shared out among the stages that gain most by it."""
    shared = (
        Stage((Option(0, 0, 0, 1, 1 + gain), Option(0, 0, 0, 1, 1, offloaded=10)))
        for gain in (3, 1, 4, 1, 5)
    )
    stages = (*shared, Stage((Option(0, 0, 0, 0, 100),)))
    problem = Problem(stages, link=LinkTimes(1e3, 1e3, room=30))
    best = solve(problem, 10**6)
    assert best.choices == (1, 0, 1, 0, 1, 0)
    assert best.offloaded == 30
    assert solve(replace(problem, link=None), 10**6).choices == (0,) * 6


GOOD = Stage((Option(1, 1, 1, 1.0, 1.0),))


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (Problem(()), "at least one stage"),
        (Problem((GOOD, Stage(()))), "stage 1 needs at least one choice"),
        (Problem((GOOD,), base=-1), "base must be at least 0, got -1"),
        (Problem((GOOD,), optimizer=-2), "optimizer must be at least 0, got -2"),
        (Problem((replace(GOOD, before_backward=-3),)), "stage 0: before_backward .* got -3"),
        (Problem((Stage((Option(-4),)),)), "stage 0, choice 0: resident .* got -4"),
        (Problem((Stage((Option(forward=-5),)),)), "stage 0, choice 0: forward .* got -5"),
        (Problem((Stage((Option(backward=-6),)),)), "choice 0: backward .* got -6"),
        (Problem((Stage((Option(offloaded=-7),)),)), "choice 0: offloaded .* got -7"),
        (Problem((Stage((Option(forward_seconds=math.nan),)),)), "forward_seconds .* got nan"),
        (Problem((Stage((Option(backward_seconds=-1.0),)),)), "backward_seconds .* got -1"),
        (Problem((Stage((Option(backward_seconds=math.inf),)),)), "backward_seconds .* got inf"),
        (Problem((Stage((Option(resident=1.5),)),)), "resident must be a whole number .* 1.5"),  # type: ignore[arg-type]
        (Problem((Stage((Option(resident=2**70),)),)), "resident must fit in 64 bits"),
        (Problem((Stage((Option(resident=2**62),)),)), "all bytes together .* resident"),
        (Problem((GOOD,), link=LinkTimes(0.0, 1.0)), "link.out must be .* above 0, got 0"),
        (Problem((GOOD,), link=LinkTimes(1.0, math.nan)), "link.back must be .* got nan"),
        (
            Problem((GOOD,), link=LinkTimes(1.0, 1.0, room=-1)),
            "link.room must be at least 0, got -1",
        ),
        (Problem((GOOD,), link=LinkTimes(1.0, 1.0, in_flight=-1)), "link.in_flight .* got -1"),
        (
            Problem(
                (Stage((Option(offloaded=9), Option(offloaded=8))),), link=LinkTimes(1, 1, room=7)
            ),
            "link.room must be at least 8, which every plan offloads, got 7",
        ),
    ],
)
def test_refuses_what_cannot_be(problem: Problem, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve(problem, 100)


def test_refuses_choices_that_are_none() -> None:
    problem = Problem((GOOD, GOOD))
    with pytest.raises(ValueError, match="one entry for each of the 2 stages, got 1"):
        evaluate(problem, (0,))
    with pytest.raises(ValueError, match="stage 1 has 1 choices, got choice 3"):
        evaluate(problem, (0, 3))
    with pytest.raises(ValueError, match="budget must be a whole number"):
        solve(problem, 1e9)  # type: ignore[arg-type]
    offloads = Problem((Stage((Option(), Option(offloaded=5))),))
    with pytest.raises(ValueError, match=r"at most link\.room = 0 bytes, got 5"):
        evaluate(offloads, (1,))
