"""Step time against peak over all budgets, and where the usual settings lie."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from memopt._plan.choices import CHOICES
from memopt._plan.choose import solved
from memopt._plan.profile import Profile
from memopt._plan.solver import Stage, evaluate
from memopt._plan.terms import UNLIMITED, Terms, problem, uniform
from memopt.assignment import KEEP, Choice


class Point(NamedTuple):
    """A way to run the step."""

    name: str
    peak: int
    """Bytes."""
    seconds: float


@dataclass(frozen=True)
class Curve:
    """Predicted by the arithmetic that plans are chosen by."""

    plans: tuple[Point, ...]
    """The best plans, from the least peak on."""
    settings: tuple[Point, ...]
    """The settings that one would choose by hand."""


def curve_of(profile: Profile, terms: Terms, count: int, plain_peak: int | None = None) -> Curve:
    """Draw the curve of plans for up to `count` budgets, evenly spread.

    Args:
        plain_peak: that of a step without a plan, where it is known better than by the arithmetic.
    """
    least, fastest = (solved(profile, budget, terms) for budget in (0, UNLIMITED))
    step = (fastest.peak - least.peak) / (count - 1)
    between = (solved(profile, least.peak + int(step * n), terms) for n in range(1, count - 1))
    plans = dict.fromkeys(Point("plan", p.peak, p.seconds) for p in (least, *between, fastest))
    keep, *others = _settings(profile, terms)
    keep = keep if plain_peak is None else keep._replace(peak=plain_peak)
    return Curve(tuple(plans), (keep, *others))


def _settings(profile: Profile, terms: Terms) -> Iterator[Point]:
    for name, choice in (
        ("keep all", KEEP),
        ("recipes only", Choice(recipes=True)),
        ("each block checkpointed", Choice(checkpoint=True)),
    ):
        if choice in CHOICES:
            solution = uniform(profile, choice, terms, head=choice.recipes)
            yield Point(name, solution.peak, solution.seconds)
    yield _segmented(profile, terms, math.isqrt(len(profile.paths)))


def _segmented(profile: Profile, terms: Terms, segments: int) -> Point:
    """Regions of several blocks each, as checkpoint_sequential makes them: a segment holds its
    first block's input, and has all its blocks' tensors when it was recomputed.
    """
    calls = range(len(profile.paths))
    length = math.ceil(len(calls) / max(1, segments))
    whole = problem(profile, terms, terms.choices, with_recipes=False)
    stages = [whole.stages[0]]
    for first in range(0, len(calls), length):
        mine = calls[first : first + length]
        kept = [profile.option(number, KEEP, with_recipes=False) for number in mine]
        before = [sum(one.resident for one in kept[:place]) for place in range(len(kept))]
        regions = [
            profile.option(number, Choice(checkpoint=True), with_recipes=False) for number in mine
        ]
        option = replace(
            regions[0],
            forward=max(one.forward for one in regions),
            backward=max(b + one.backward for b, one in zip(before, kept, strict=True)),
            forward_seconds=sum(one.forward_seconds for one in kept),
            backward_seconds=sum(one.forward_seconds + one.backward_seconds for one in kept),
        )
        stages.append(Stage((option,), whole.stages[mine[-1] + 1].before_backward))
    stages.append(whole.stages[-1])
    solution = evaluate(replace(whole, stages=tuple(stages)), [0] * len(stages))
    return Point(f"{segments} segments (sqrt)", solution.peak, solution.seconds)
