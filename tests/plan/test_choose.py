"""Proves: the plan that is chosen is the fastest within the budget, with what recipes cost the
blocks that have none; it is not slower than one choice for all blocks; and alike blocks stand in
the order that people expect.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from torch import nn

import memopt
from memopt._plan.bytes import StageBytes, StepBytes
from memopt._plan.choices import CHOICES
from memopt._plan.choose import _in_order, choose_plan, solved
from memopt._plan.curve import curve_of
from memopt._plan.groups import group_option
from memopt._plan.levels import Case
from memopt._plan.observe import Observed
from memopt._plan.profile import Profile
from memopt._plan.samples import Look
from memopt._plan.seconds import StageSeconds
from memopt._plan.solver import solve
from memopt._plan.terms import Terms, evaluated, problem, uniform
from memopt.assignment import Assignment, Choice
from memopt.memory.ledger import Ledger
from tests.plan.models import chain
from tests.plan.support import plans_of

EVERYTHING = 1 << 30


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 0.9])
def test_alike_blocks_are_in_order(share: float) -> None:
    """The first ones hold least, the last ones most; and no order of the same choices is faster, or
    needs less where this one needs all of the budget.
    """
    model, batch = chain()
    rich = memopt.plan(model, batch, EVERYTHING, measure=False, chunks=False)
    least = curve_of(rich.profile, rich.terms, 2).plans[0].peak
    plan = rich.within(int(least + share * (rich.plain_peak - least)))
    held = [block.kept for block in plan.blocks]
    assert held == sorted(held)
    assert len(set(held)) > 1
    whole = problem(plan.profile, plan.terms, CHOICES, with_recipes=True)
    assert plan.seconds <= solve(whole, plan.budget).seconds


@pytest.mark.parametrize("offload", [0.0, 0.5, 1.0])
def test_calls_in_one_region_that_end_more_than_they_keep(offload: float) -> None:
    """Features that were cached before them, say: of less than nothing, nothing is offloaded."""
    profile = random_profile(Random(0))
    shared = Choice(checkpoint=True)
    profile.exact_groups[0, 2, shared] = StageBytes(-100, 10, 10, 0)
    choice = replace(shared, offload=offload)
    option = group_option(profile, 0, 2, choice, with_recipes=False)
    assert (option.resident, option.offloaded) == (0, 0)


def test_in_order_only_where_it_costs_nothing() -> None:
    """Random blocks of two kinds: never slower than what the solver found, and within the budget
    where that was.
    """
    random = Random(0)
    moved = kept = 0
    for _ in range(200):
        profile = random_profile(random)
        terms = Terms()
        for found in plans_of(problem(profile, terms, CHOICES, with_recipes=True), 6):
            found = evaluated(profile, terms, found.choices)
            ordered = _in_order(profile, found, found.peak, terms)
            assert ordered.seconds <= found.seconds
            assert ordered.peak <= found.peak
            assert sorted(ordered.choices) == sorted(found.choices)
            in_order = all(
                held == sorted(held) for held in held_by_kind(profile, ordered.choices, terms)
            )
            moved += ordered.choices != found.choices
            kept += not in_order
    assert moved > 20
    assert kept > 20  # with other bytes in forward another order may be needed


def test_what_recipes_cost_the_other_blocks_counts() -> None:
    """Random blocks that take longer beside recipes: the plan is the fastest of all within the
    budget, with recipes and without, and the curve's points are.
    """
    random = Random(1)
    with_recipes = 0
    for _ in range(60):
        profile, terms = random_profile(random, most=4), Terms()
        every = [
            evaluated(profile, terms, [0, *numbers, 0])
            for numbers in product(range(len(CHOICES)), repeat=len(profile.paths))
        ]
        budget = random.choice(every).peak
        best = min(plan.seconds for plan in every if plan.peak <= budget)
        found = solved(profile, budget, terms)
        assert found.peak <= budget
        assert found.seconds == pytest.approx(best)
        with_recipes += any(CHOICES[number].recipes for number in found.choices[1:-1])
        for point in curve_of(profile, terms, 5).plans:
            fastest = min(plan.seconds for plan in every if plan.peak <= point.peak)
            assert point.seconds == pytest.approx(fastest)
    assert 10 < with_recipes < 50


def test_never_slower_than_one_choice_for_all() -> None:
    """Random blocks of which all but the first hold less than their kind's number says, as where
    neighbours share a tensor: one choice for all blocks, if it fits in truth, is no faster than the
    plan, although the arithmetic says that it does not fit.
    """
    random = Random(2)
    refused_by_arithmetic = 0
    for _ in range(60):
        profile, terms = random_profile(random), Terms()
        profile.base = 1000
        truth = copy.deepcopy(profile)
        for number, kind in enumerate(truth.kinds[1:], 1):
            for choice in CHOICES:
                counted = profile.nbytes[kind, choice]
                held = max(0, counted.resident - random.randint(0, 2))
                truth.exact[number, choice] = replace(counted, resident=held)
        choice = random.choice(CHOICES)
        rule = uniform(truth, choice, terms)
        refused_by_arithmetic += uniform(profile, choice, terms).peak > rule.peak
        chosen, fits = choose_plan(profile, rule.peak, a_look_at(truth, terms), terms)
        assert fits
        assert chosen.peak <= rule.peak
        assert chosen.solution.seconds <= rule.seconds
    assert refused_by_arithmetic > 20


def a_look_at(truth: Profile, terms: Terms) -> Look:
    """Steps that cost what a profile says."""

    def look(assignment: Assignment) -> Observed:
        mine = [assignment.of(path) for path in truth.paths]
        numbers = [0, *(CHOICES.index(choice) for choice in mine), 0]
        peak = evaluated(truth, terms, numbers).peak
        stages = [
            truth.exact.get((number, choice)) or truth.nbytes[kind, choice]
            for number, (kind, choice) in enumerate(zip(truth.kinds, mine, strict=True))
        ]
        ends = [truth.ends[name][0] for name in ("before", "after")]
        return Observed(
            nbytes=StepBytes(truth.base, peak, 0, (ends[0], *stages, ends[1]), peak, True),
            seconds=[],
            paths=truth.paths,
            kinds=truth.kinds,
            sites=truth.sites,
            ledger=Ledger(nn.Identity()),
        )

    return look


def random_profile(random: Random, most: int = 7) -> Profile:
    kinds = tuple(random.choice((0, 1)) for _ in range(random.randint(2, most)))
    nbytes, seconds = {}, {}
    for kind in set(kinds):
        held = sorted((random.randint(0, 9) for _ in CHOICES), reverse=True)
        for number, choice in enumerate(CHOICES):
            transient = random.randint(0, 12)
            nbytes[kind, choice] = StageBytes(held[number], held[number] + 2, transient, 0)
            seconds[Case(kind, choice)] = StageSeconds(1.0, 2.0 + number)
            if not choice.recipes:
                hooked = random.choice((0.0, 0.3, 1.0))
                seconds[Case(kind, choice, True)] = StageSeconds(1.0 + hooked, 2.0 + number)
    end = StageBytes(0, 1, 1, 0), StageSeconds(0.0, 0.0)
    return Profile(
        paths=tuple(f"blocks.{number}" for number in range(len(kinds))),
        kinds=kinds,
        sites=kinds,
        base=0,
        optimizer=0,
        gradients=(0,) * (len(kinds) + 2),
        ends={"before": end, "after": end},
        nbytes=nbytes,
        seconds=seconds,
    )


def held_by_kind(profile: Profile, choices: Sequence[int], terms: Terms) -> Iterator[list[int]]:
    for kind in set(profile.kinds):
        numbers = [number for number, other in enumerate(profile.kinds) if other == kind]
        yield [
            profile.option(number, terms.choices[choices[number + 1]], with_recipes=True).resident
            for number in numbers
        ]
