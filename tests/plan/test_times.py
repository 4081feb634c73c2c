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
from memopt.plan.choice import CHOICES, KEEP, Assignment, Choice
from memopt.plan.levels import Timed
from memopt.plan.live import Live
from memopt.plan.profile import Profile
from memopt.plan.seconds import StageSeconds
from memopt.plan.times import seconds_of

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
) -> list[Timed]:
    """Each choice in each of the steps, by a block at each place in turn.

    Args:
        places: factors of the time of blocks of a kind, by where they stand.
    """

    def varied(seconds: float, place: float) -> float:
        return seconds * place * math.exp(random.gauss(0, noise))

    timed = []
    for kind in range(kinds):
        for choice, step in product(CHOICES, range(steps)):
            true = true_seconds(kind, choice, recipes[kind])
            number = (CHOICES.index(choice) + step) % len(places)
            one = StageSeconds(*(varied(t, places[number]) for t in (true.forward, true.backward)))
            timed.append(Timed(len(places) * kind + number, kind, choice, one))
    return timed


def total(seconds: StageSeconds) -> float:
    return seconds.forward + seconds.backward


def least(found: dict[tuple[int, Choice], StageSeconds], kinds: int) -> tuple[float, float]:
    """By the choice of least time of each kind: that time over the plain one, and the true one."""
    told = plain = true = 0.0
    for kind in range(kinds):
        best = min(CHOICES, key=lambda choice: total(found[kind, choice]))
        told += total(found[kind, best])
        plain += total(found[kind, KEEP])
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
    """However times vary, running again is never free, and takes the same share of each forward."""
    random = Random(1)
    for _ in range(50):
        found = seconds_of(noisy(random, 4, 3, [1.0] * 4, 0.1))
        shares = [
            (found[kind, region].backward - own.backward) / own.forward
            for kind in range(4)
            for own, region in ((found[kind, KEEP], REGION), (found[kind, RECIPES], BOTH))
        ]
        assert shares == pytest.approx([shares[0]] * 8)
        assert 0.3 < shares[0] < 1.3
        assert all(found[kind, REGION].forward == found[kind, KEEP].forward for kind in range(4))


def test_what_differs_really_is_told_apart() -> None:
    """Recipes that make some kinds 20 % faster and others slower, in steps that vary by 2 %."""
    factors = [0.8, 1.2, 1.0, 1.2]
    found = seconds_of(noisy(Random(2), 4, 5, factors, 0.02))
    for kind, factor in enumerate(factors):
        ratio = total(found[kind, RECIPES]) / total(found[kind, KEEP])
        assert ratio == pytest.approx(factor, rel=0.04)


def test_what_all_kinds_share_is_no_chance() -> None:
    """Recipes make each of eight kinds 5 % slower, in steps that vary by 5 %: in one kind that
    could be chance. Together it is seen, and on the average it is told as it is.
    """
    random = Random(5)
    ratios = []
    for _ in range(100):
        found = seconds_of(noisy(random, 8, 3, [1.05] * 8, 0.05))
        ratios += [total(found[kind, RECIPES]) / total(found[kind, KEEP]) for kind in range(8)]
    assert sum(ratios) / len(ratios) == pytest.approx(1.05, abs=0.01)


def test_the_place_of_a_block_is_not_taken_for_its_choice() -> None:
    """The last blocks of a kind take half as long again as the first ones. Each has several of the
    choices, none has all, and recipes' 2 % are seen.
    """
    places = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
    found = seconds_of(noisy(Random(6), 2, 3, [1.02, 1.02], 0.0, places))
    for kind in range(2):
        ratio = total(found[kind, RECIPES]) / total(found[kind, KEEP])
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
        ratio = total(found[kind, RECIPES]) / total(found[kind, KEEP])
        assert ratio == pytest.approx(1.05, abs=0.015)


def test_times_without_noise_are_exact() -> None:
    found = seconds_of(noisy(Random(3), 3, 2, [0.9, 1.1, 1.0], 0.0))
    for (kind, choice), seconds in found.items():
        true = true_seconds(kind, choice, [0.9, 1.1, 1.0][kind])
        assert seconds.forward == pytest.approx(true.forward)
        assert seconds.backward == pytest.approx(true.backward)


def test_alike_blocks_hand_their_choices_on() -> None:
    """In as many steps as there are blocks of a kind, each has had every choice of the kind."""
    profile = Profile(
        paths=("a", "b", "c", "d"),
        kinds=(0, 1, 0, 0),
        base=0,
        optimizer=0,
        gradients=(),
        ends={},
        nbytes={},
        seconds={},
    )
    first = Assignment({"a": KEEP, "b": RECIPES, "c": REGION, "d": BOTH})
    steps = [profile.handed_on(first, number).choices for number in range(3)]
    assert steps[0] == first.choices
    for path in ("a", "c", "d"):
        assert {step[path] for step in steps} == {KEEP, REGION, BOTH}
    assert all(step["b"] == RECIPES for step in steps)


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
    found = seconds_of(one for one in samples if one.choice in known)
    assert set(found) == {(kind, choice) for kind in range(2) for choice in CHOICES}
    for kind in range(2):
        assert total(found[kind, KEEP]) == pytest.approx(total(found[kind, RECIPES]))
        more = total(found[kind, REGION]) - total(found[kind, KEEP])
        is_measured = any(not c.checkpoint for c in known)
        share = 0.8 if is_measured else 1.0
        assert more == pytest.approx(share * found[kind, KEEP].forward)
