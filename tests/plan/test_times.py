"""Proves: times that vary from step to step do not make plans that take longer than they say: a
choice that happened to come out low is not taken for a fast one, and what is really faster is; nor
is the place of a block, or what recipes of its neighbours cost it, taken for its choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt._plan.choices import CHOICES
from memopt._plan.levels import Case, Timed
from memopt._plan.live import Live
from memopt._plan.profile import Profile
from memopt._plan.seconds import StageSeconds
from memopt._plan.times import seconds_of
from memopt.assignment import KEEP, Assignment, Choice
from memopt.memory import speed

RECIPES, REGION, BOTH = Choice(True), Choice(False, True), Choice(True, True)


def true_seconds(kind: int, choice: Choice, recipes: float) -> StageSeconds:
    """A region's second run takes 0.8 of its forward; recipes a factor of all."""
    forward = 0.01 * (1 + kind)
    scale = recipes if choice.recipes else 1.0
    return StageSeconds(scale * forward, scale * forward * (2 + 0.8 * choice.checkpoint))


def noisy(
    random: Random,
    kinds: int,
    steps: int,
    recipes: list[float],
    noise: float,
    places: tuple[float, ...] = (1.0,),
    samples: int = len(CHOICES),
) -> list[Timed]:
    """Rounds of some samples, in which the choices are handed on.

    Args:
        steps: the number of rounds.
        places: factors of the time of blocks of a kind, by where they stand.
    """

    def varied(seconds: float, place: float) -> float:
        return seconds * place * math.exp(random.gauss(0, noise))

    timed = []
    for kind in range(kinds):
        for step, sample, number in product(range(steps), range(samples), range(len(places))):
            choice = CHOICES[(number + sample + step) % len(CHOICES)]
            true = true_seconds(kind, choice, recipes[kind])
            one = StageSeconds(*(varied(t, places[number]) for t in (true.forward, true.backward)))
            timed.append(Timed(len(places) * kind + number, Case(kind, choice), one, step))
    return timed


def total(seconds: StageSeconds) -> float:
    return seconds.forward + seconds.backward


def least(found: dict[Case, StageSeconds], kinds: int) -> tuple[float, float]:
    """By the choice of least time of each kind: that time over the plain one, and the true one."""
    told = plain = true = 0.0
    for kind in range(kinds):
        best = min(CHOICES, key=lambda choice: total(found[Case(kind, choice)]))
        told += total(found[Case(kind, best)])
        plain += total(found[Case(kind, KEEP)])
        true += total(true_seconds(kind, best, 1.0)) / total(true_seconds(kind, KEEP, 1.0))
    return told / plain, true / kinds


@pytest.mark.parametrize("kinds", [1, 4, 8])
def test_what_is_chosen_takes_as_long_as_was_said(kinds: int) -> None:
    """Recipes cost nothing and save no time, steps vary by 10 %: each kind has a choice that came
    out low by chance. On the average the time told is nearly the true one; by medians of each
    choice it is 2.4 to 2.8 points too low.
    """
    random = Random(0)
    errors = []
    for _ in range(100):
        told, true = least(seconds_of(noisy(random, kinds, 3, [1.0] * kinds, 0.1)), kinds)
        errors.append(told - true)
    assert abs(sum(errors) / len(errors)) < 0.01


def test_a_region_costs_its_second_run() -> None:
    """However times vary, running again is never free, and takes much the same share of each
    forward; with recipes inside the same.
    """
    random = Random(1)
    for _ in range(50):
        found = seconds_of(noisy(random, 4, 3, [1.0] * 4, 0.1))
        shares = [
            (found[Case(kind, region)].backward - own.backward) / own.forward
            for kind in range(4)
            for plain, region in ((KEEP, REGION), (RECIPES, BOTH))
            for own in (found[Case(kind, plain)],)
        ]
        assert shares[0::2] == pytest.approx(shares[1::2])
        assert max(shares) - min(shares) < 0.35
        assert 0.3 < shares[0] < 1.3
        for kind in range(4):
            assert found[Case(kind, REGION)].forward == found[Case(kind, KEEP)].forward


def test_second_runs_that_really_differ_are_told_apart() -> None:
    """One kind's regions take half as long again as its forward, in steps that vary by 2 %."""
    timed = []
    for one in noisy(Random(9), 3, 5, [1.0] * 3, 0.02):
        if one.case.kind == 1 and one.case.choice.checkpoint:
            more = 0.7 * true_seconds(1, KEEP, 1.0).forward
            seconds = replace(one.seconds, backward=one.seconds.backward + more)
            one = replace(one, seconds=seconds)
        timed.append(one)
    found = seconds_of(timed)
    for kind, share in enumerate((0.8, 1.5, 0.8)):
        own = found[Case(kind, KEEP)]
        more = found[Case(kind, REGION)].backward - own.backward
        assert more / own.forward == pytest.approx(share, abs=0.1)


def test_a_block_that_does_next_to_nothing_says_nothing_about_the_others() -> None:
    """The second run of one kind, a thousandth of the others, takes 30 times its forward, since a
    region costs something by itself.
    """
    random = Random(13)
    timed = noisy(random, 3, 5, [1.0] * 3, 0.03)
    for one in noisy(random, 1, 5, [1.0], 0.03):
        forward, region = 1e-3 * one.seconds.forward, one.case.choice.checkpoint
        seconds = StageSeconds(forward, forward * (31 if region else 2))
        timed.append(replace(one, call=9, case=one.case._replace(kind=9), seconds=seconds))
    found = seconds_of(timed)
    for kind in range(3):
        own = found[Case(kind, KEEP)]
        again = (found[Case(kind, REGION)].backward - own.backward) / own.forward
        assert again == pytest.approx(0.8, abs=0.15)


def test_slow_minutes_are_not_taken_for_chance() -> None:
    """Rounds differ by 20 %, steps of a round by 0.5 %: recipes' 3 % are seen all the same."""
    random = Random(10)
    slow = [math.exp(random.gauss(0, 0.2)) for _ in range(7)]
    timed = []
    for one in noisy(random, 3, 7, [1.03] * 3, 0.005):
        factor = slow[one.round]
        seconds = StageSeconds(factor * one.seconds.forward, factor * one.seconds.backward)
        timed.append(replace(one, seconds=seconds))
    found = seconds_of(timed)
    for kind in range(3):
        ratio = total(found[Case(kind, RECIPES)]) / total(found[Case(kind, KEEP)])
        assert ratio == pytest.approx(1.03, abs=0.01)


def test_what_recipes_of_others_cost_is_told_apart() -> None:
    """Steps without recipes, and beside recipes 4 % slower ones: each is told as it is, also of
    regions; recipes take as long as what is beside them.
    """
    timed = noisy(Random(11), 2, 5, [1.04] * 2, 0.005)
    for one in noisy(Random(12), 2, 5, [1.0] * 2, 0.005):
        if not one.case.choice.recipes:
            seconds = StageSeconds(1.04 * one.seconds.forward, 1.04 * one.seconds.backward)
            case = one.case._replace(is_beside=True)
            timed.append(replace(one, case=case, seconds=seconds))
    found = seconds_of(timed)
    for kind in range(2):
        alone = total(found[Case(kind, KEEP)])
        assert total(found[Case(kind, KEEP, True)]) / alone == pytest.approx(1.04, abs=0.01)
        assert total(found[Case(kind, RECIPES)]) / alone == pytest.approx(1.04, abs=0.015)
        regions = [total(found[Case(kind, REGION, beside)]) for beside in (False, True)]
        assert regions[1] / regions[0] == pytest.approx(1.04, abs=0.015)


def test_what_differs_really_is_told_apart() -> None:
    """Recipes that make some kinds 20 % faster and others slower, in steps that vary by 2 %."""
    factors = [0.8, 1.2, 1.0, 1.2]
    found = seconds_of(noisy(Random(2), 4, 5, factors, 0.02))
    for kind, factor in enumerate(factors):
        ratio = total(found[Case(kind, RECIPES)]) / total(found[Case(kind, KEEP)])
        assert ratio == pytest.approx(factor, rel=0.04)


def test_what_all_kinds_share_is_no_chance() -> None:
    """Recipes make each of eight kinds 5 % slower, in steps that vary by 5 %: in one kind that
    could be chance. Together it is seen, and on the average it is told as it is.
    """
    random = Random(5)
    ratios = []
    for _ in range(100):
        found = seconds_of(noisy(random, 8, 3, [1.05] * 8, 0.05))
        for kind in range(8):
            ratios.append(total(found[Case(kind, RECIPES)]) / total(found[Case(kind, KEEP)]))
    assert sum(ratios) / len(ratios) == pytest.approx(1.05, abs=0.01)


def test_the_place_of_a_block_is_not_taken_for_its_choice() -> None:
    """The last blocks of a kind take half as long again as the first ones, and no block had all of
    the choices in a round. Recipes' 2 % are seen.
    """
    places = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
    found = seconds_of(noisy(Random(6), 2, 3, [1.02, 1.02], 0.0, places, samples=3))
    for kind in range(2):
        ratio = total(found[Case(kind, RECIPES)]) / total(found[Case(kind, KEEP)])
        assert ratio == pytest.approx(1.02, abs=1e-3)


def test_a_step_that_was_held_up_counts_little() -> None:
    """One step in ten takes five times as long; recipes' 5 % are told as they are."""
    random = Random(7)
    timed = noisy(random, 4, 7, [1.05] * 4, 0.01)
    for number in range(0, len(timed), 10):
        one = timed[number]
        slow = StageSeconds(5 * one.seconds.forward, 5 * one.seconds.backward)
        timed[number] = replace(one, seconds=slow)
    found = seconds_of(timed)
    for kind in range(4):
        ratio = total(found[Case(kind, RECIPES)]) / total(found[Case(kind, KEEP)])
        assert ratio == pytest.approx(1.05, abs=0.015)


def test_times_without_noise_are_exact() -> None:
    found = seconds_of(noisy(Random(3), 3, 2, [0.9, 1.1, 1.0], 0.0))
    for (kind, choice, _), seconds in found.items():
        true = true_seconds(kind, choice, [0.9, 1.1, 1.0][kind])
        assert seconds.forward == pytest.approx(true.forward)
        assert seconds.backward == pytest.approx(true.backward)


def test_alike_blocks_hand_their_choices_on() -> None:
    """In as many steps as there are blocks of a kind, each has had every choice of the kind."""
    profile = Profile(
        paths=("a", "b", "c", "d"),
        kinds=(0, 1, 0, 0),
        sites=(0, 1, 0, 0),
        base=0,
        optimizer=0,
        gradients=(),
        ends={},
        nbytes={},
        seconds={},
    )
    first = Assignment({"a": KEEP, "b": RECIPES, "c": REGION, "d": BOTH})
    steps = [profile.handed_on(first, number) for number in range(3)]
    assert steps[0].choices == first.choices
    for path in ("a", "c", "d"):
        assert {step.of(path) for step in steps} == {KEEP, REGION, BOTH}
    assert all(step.of("b") == RECIPES for step in steps)


def test_steps_without_the_other_are_timed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the mixed ones: nothing on the model, and recipes in every block."""
    seen: list[Assignment] = []
    timed = Live._timed

    def spy(live: Live, profile: Profile, samples: Sequence[Assignment]) -> Any:
        seen.extend(samples)
        return timed(live, profile, samples)

    monkeypatch.setattr(Live, "_timed", spy)
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(4)))
    memopt.plan(model, torch.randn(2, 8), 1 << 40, loss=torch.sum, optimizer=None)
    alike = [set(assignment.choices.values()) for assignment in seen]
    assert {KEEP} in alike
    assert {RECIPES} in alike
    assert any(len(choices) > 1 for choices in alike)


def test_a_default_device_changes_nothing() -> None:
    timed = noisy(Random(8), 2, 3, [1.1, 0.9], 0.05, (1.0, 1.2))
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        found = seconds_of(timed)
    assert found == seconds_of(timed)


@pytest.mark.parametrize("known", [[BOTH], [REGION], [RECIPES, BOTH], [KEEP, REGION]])
def test_choices_that_no_step_had(known: list[Choice]) -> None:
    """Where memory had no room for them: a region takes a forward more, recipes nothing."""
    samples = noisy(Random(4), 2, 2, [1.0, 1.0], 0.0)
    found = seconds_of(one for one in samples if one.case.choice in known)
    assert {case[:2] for case in found} == set(product(range(2), CHOICES))
    for kind in range(2):
        assert total(found[Case(kind, KEEP)]) == pytest.approx(total(found[Case(kind, RECIPES)]))
        more = total(found[Case(kind, REGION)]) - total(found[Case(kind, KEEP)])
        is_measured = any(not c.checkpoint for c in known)
        share = 0.8 if is_measured else 1.0
        assert more == pytest.approx(share * found[Case(kind, KEEP)].forward)


@pytest.mark.parametrize("width", [16, 1 << 12])
def test_an_estimate_for_cuda_is_no_shorter_than_the_host_needs_for_launches(width: int) -> None:
    """Where a block does little the host is the bound; where it does much nothing changes."""

    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    model = nn.Sequential(*[block() for _ in range(3)]).to("meta")
    batch = torch.empty(width, width, device="meta")
    options: dict[str, Any] = {"loss": torch.sum, "optimizer": None, "measure": False}
    on_cuda, elsewhere = (
        memopt.plan(model, batch, 1 << 50, device=device, chunks=False, **options)
        for device in ("cuda", "cpu")
    )
    work = memopt.anatomy(model, batch, device="cuda", **options).trace.work
    launches = sum(row.phase in ("forward", "backward") for row in work) * speed._LAUNCH
    assert launches > 0
    assert on_cuda.plain_seconds >= launches
    if width == 16:
        assert on_cuda.plain_seconds > 10 * elsewhere.plain_seconds
    else:
        assert on_cuda.plain_seconds == pytest.approx(elsewhere.plain_seconds, rel=0.01)
