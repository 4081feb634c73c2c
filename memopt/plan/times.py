"""What the times of real steps say of choices.

Times of one block differ by several percent from step to step. Were each choice's own median taken
as it is, a plan would choose those that happened to come out low, and take longer than was said,
the more so the more kinds of blocks there are. So what choices have in common is measured together:

- a region's forward is the block's own;
- its backward is the block's own and, by one factor of all blocks, a forward more;
- with recipes a block takes a factor of its time without. The factors of the kinds are drawn
  towards their mean as far as their differences may be chance, and the mean towards 1 as far as it
  may be (Efron and Morris, "Stein's estimation rule and its competitors", 1973): many kinds that
  each take 3 % longer, which could be chance in each, are no chance together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from memopt.plan.choice import CHOICES, Choice
from memopt.plan.levels import Samples, Timed, levelled
from memopt.plan.seconds import StageSeconds


@dataclass(frozen=True)
class _Block:
    """Of a kind, with recipes or without."""

    forward: float
    backward: float
    """Of the block alone."""
    variance: float = 0.0
    """Of the logarithm of both together."""

    @property
    def both(self) -> float:
        return self.forward + self.backward


def seconds_of(timed: Iterable[Timed]) -> dict[tuple[int, Choice], StageSeconds]:
    """Of every choice of each kind, also those that no step had."""
    samples = levelled(timed)
    again = _recompute(samples)
    kinds = sorted({kind for kind, _ in samples})
    found = {
        (kind, recipes): _block(samples, kind, recipes, again)
        for kind in kinds
        for recipes in (False, True)
    }
    factors = _factors({kind: (found[kind, False], found[kind, True]) for kind in kinds})
    seconds = {}
    for kind in kinds:
        for choice in CHOICES:
            one = _of(found, kind, choice.recipes, factors)
            backward = one.backward + again * one.forward * choice.checkpoint
            seconds[kind, choice] = StageSeconds(one.forward, backward)
    return seconds


def _recompute(samples: Samples) -> float:
    """How long a region's second run takes, by its forward: of all blocks the median."""
    ratios = []
    for (kind, choice), regions in samples.items():
        plain = samples.get((kind, Choice(choice.recipes)))
        if choice.checkpoint and plain:
            forward = _forward(samples, kind, choice.recipes)
            backward = median(one.backward for one in plain)
            ratios += [(one.backward - backward) / forward for one in regions if forward]
    return max(0.0, median(ratios)) if ratios else 1.0


def _forward(samples: Samples, kind: int, recipes: bool) -> float:
    both = (samples.get((kind, Choice(recipes, region)), ()) for region in (False, True))
    return median(one.forward for found in both for one in found)


def _block(samples: Samples, kind: int, recipes: bool, again: float) -> _Block | None:
    plain = samples.get((kind, Choice(recipes)), ())
    regions = samples.get((kind, Choice(recipes, True)), ())
    if not plain and not regions:
        return None
    forward = _forward(samples, kind, recipes)
    # Where memory had no room for a step without regions, its backward is what is left of theirs.
    alone = [one.backward for one in plain] or [
        max(0.0, one.backward - again * forward) for one in regions
    ]
    chance = math.pi / 2 * _chance(samples, kind) / len(plain) if plain else 0.0  # of a median
    return _Block(forward, median(alone), chance)


def _chance(samples: Samples, kind: int) -> float:
    """The variance of log t of a kind's blocks: by the median of the distances from each choice's
    median (Hampel, "The influence curve and its role in robust estimation", 1974), which a step
    that something else held up does not move.
    """
    distances: list[float] = []
    for (other, _), found in samples.items():
        logs = [math.log(one.forward + one.backward) for one in found if one.forward]
        if other == kind and len(logs) > 1:
            middle = median(logs)
            from_it = sorted(abs(log - middle) for log in logs)
            number = len(logs)
            scale = math.sqrt(number / (number - 1))
            distances += [scale * d for d in from_it[number % 2 :]]  # not the middle one's own
    return (1.4826 * median(distances)) ** 2 if distances else 0.0


def _factors(pairs: Mapping[int, tuple[_Block | None, _Block | None]]) -> dict[int, float]:
    """By kind, the time with recipes by the time without."""
    logs, chances = {}, {}
    for kind, (plain, recipes) in pairs.items():
        if plain is not None and recipes is not None and plain.both and recipes.both:
            logs[kind] = math.log(recipes.both / plain.both)
            chances[kind] = plain.variance + recipes.variance
    if not logs:
        return {}
    drawn = _drawn(list(logs.values()), list(chances.values()))
    return {kind: math.exp(value) for kind, value in zip(logs, drawn, strict=True)}


def _drawn(values: Sequence[float], chances: Sequence[float]) -> list[float]:
    """The values, each with the variance of its error, drawn towards their mean, and that towards
    0.
    """
    center = fmean(values)
    count = len(values)
    spread = sum((value - center) ** 2 for value in values) / (count - 1) if count > 1 else 0.0
    real = max(0.0, spread - fmean(chances))
    if any(real + chance == 0 for chance in chances):  # nothing is chance
        return list(values)
    weights = [1 / (real + chance) for chance in chances]
    total = sum(weights)
    mean = sum(weight * value for weight, value in zip(weights, values, strict=True)) / total
    chance_of_mean = sum(w**2 * chance for w, chance in zip(weights, chances, strict=True))
    common = mean * max(0.0, 1 - chance_of_mean / (total * mean) ** 2) if mean else 0.0
    return [
        common + (value - mean) * real / (real + chance)
        for value, chance in zip(values, chances, strict=True)
    ]


def _of(
    found: Mapping[tuple[int, bool], _Block | None],
    kind: int,
    recipes: bool,
    factors: Mapping[int, float],
) -> _Block:
    mine, other = found[kind, recipes], found[kind, not recipes]
    if mine is None:
        assert other is not None  # a kind has a sample
        return other
    if not recipes or kind not in factors:
        return mine
    assert other is not None
    scale = factors[kind] * other.both / mine.both
    return _Block(scale * mine.forward, scale * mine.backward)
