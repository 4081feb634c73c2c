"""Estimates the cost of choices from the times of real steps.

Times of one block differ by several percent from step to step. If each choice's own median were
taken as it is, a plan would prefer those that were low by chance, and take longer than it said, the
more so the more kinds of blocks there are. So effects that choices have in common are measured
together:

- a region's forward is the block's own;
- its backward is the block's own plus one forward times a factor: kernels run as they did before,
  while the cost of beginning and ending the recompute weighs more in a small block;
- the tensors that a block saves pass a hook as soon as any block has recipes: that is a factor of
  its time;
- and with recipes of its own it takes a factor of that.

The factors of the kinds are shrunk towards their mean as far as their differences may be chance,
and the mean towards 1 as far as it may be (Efron and Morris, "Stein's estimation rule and its
competitors", 1973): if many kinds each take 3 % longer, that could be chance in each of them, but
not in all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from memopt._plan.levels import Case, Sample, Samples, Timed, levelled
from memopt._plan.seconds import StageSeconds
from memopt.assignment import KEEP, Choice


@dataclass(frozen=True)
class _Block:
    """The times of a kind of blocks."""

    forward: float
    backward: float
    """Seconds of the block alone."""
    variance: float = 0.0
    """The variance of the logarithm of both together."""

    @property
    def both(self) -> float:
        return self.forward + self.backward


def seconds_of(
    timed: Iterable[Timed], shares: Mapping[Case, float] | None = None
) -> dict[Case, StageSeconds]:
    """Return the seconds of every case of each kind, also those that no step had.

    Args:
        shares: the share of its forward that backward runs again, in cases with parts as regions.
    """
    samples = levelled(timed)
    kinds = sorted({case.kind for case in samples})
    again = _second_runs(samples, kinds)
    alone, beside, own = (
        {kind: _block(samples, Case(kind, choice, is_beside), again[kind]) for kind in kinds}
        for choice, is_beside in ((KEEP, False), (KEEP, True), (Choice(recipes=True), False))
    )
    of_hook = _factors({kind: (alone[kind], beside[kind]) for kind in kinds})
    of_recipes = _factors({kind: (beside[kind] or alone[kind], own[kind]) for kind in kinds})
    seconds = {}
    for kind in kinds:
        first = alone[kind] or beside[kind] or own[kind]
        assert first is not None  # a kind has a sample
        hooked = _of_length(beside[kind] or first, first.both * of_hook.get(kind, 1.0))
        made = _of_length(own[kind] or hooked, hooked.both * of_recipes.get(kind, 1.0))
        for one, recipes, is_beside in (
            (first, False, False),
            (hooked, False, True),
            (made, True, False),
        ):
            for region in (False, True):
                backward = one.backward + again[kind] * one.forward * region
                case = Case(kind, Choice(recipes, region), is_beside)
                seconds[case] = StageSeconds(one.forward, backward)
    for case, share in (shares or {}).items():
        plain = seconds[case._replace(choice=Choice(case.choice.recipes))]
        backward = plain.backward + share * again[case.kind] * plain.forward
        seconds[case] = StageSeconds(plain.forward, backward)
    return seconds


def _second_runs(samples: Samples, kinds: Sequence[int]) -> dict[int, float]:
    """Return, by kind, the time of a region's recompute over that of its forward."""
    values, chances, sizes = {}, {}, {}
    for kind in kinds:
        found = [r for c in samples if c.kind == kind and (r := _second_run(samples, c))]
        ratios = [ratio for one, _ in found for ratio in one]
        if ratios:
            values[kind] = median(ratios) - 1
            of_plain = fmean(chance for _, chance in found)
            chances[kind] = _of_median(_variance([one for one, _ in found]), ratios) + of_plain
            mine = [one.forward for case in samples if case.kind == kind for one in samples[case]]
            sizes[kind] = fmean(mine)
    if not values:
        return dict.fromkeys(kinds, 1.0)
    drawn = _drawn(list(values.values()), list(chances.values()), list(sizes.values()))
    again = {kind: max(0.0, 1 + value) for kind, value in zip(values, drawn, strict=True)}
    return {kind: again.get(kind, median(again.values())) for kind in kinds}


def _second_run(samples: Samples, case: Case) -> tuple[list[float], float] | None:
    """Second runs of regions, each by its forward; and the variance that the plain time adds."""
    plain = samples.get(case._replace(choice=Choice(case.choice.recipes)))
    if not case.choice.checkpoint or not plain:
        return None
    forward = median(one.forward for one in (*plain, *samples[case]))
    if not forward:
        return None
    backward = [one.backward for one in plain]
    chance = _of_median(_variance([backward]), backward) / forward**2
    return [(one.backward - median(backward)) / forward for one in samples[case]], chance


def _block(samples: Samples, case: Case, again: float) -> _Block | None:
    """The times of a case without a region."""
    plain = samples.get(case, ())
    regions = samples.get(case._replace(choice=replace(case.choice, checkpoint=True)), ())
    if not plain and not regions:
        return None
    forward = median(one.forward for one in (*plain, *regions))
    if not plain:
        # Memory had no room for it. What is left of the regions'.
        backward = [max(0.0, one.backward - again * forward) for one in regions]
        return _Block(forward, median(backward))
    logs = [_by_round(found) for other, found in samples.items() if other.kind == case.kind]
    rounds = _by_round(plain)
    chance = _of_median(_variance(logs), rounds) if rounds else 0.0
    return _Block(forward, median(one.backward for one in plain), chance)


def _of_length(block: _Block, both: float) -> _Block:
    """A block whose forward and backward take so long together."""
    if not block.both:
        return block
    scale = both / block.both
    return _Block(scale * block.forward, scale * block.backward)


def _by_round(found: Sequence[Sample]) -> list[float]:
    """The median of log t in each round: what slows a step down slows all of its blocks down, so
    that they are no more than one sample.
    """
    logs: dict[int, list[float]] = {}
    for one in found:
        if one.forward:
            logs.setdefault(one.round, []).append(math.log(one.forward + one.backward))
    return [median(values) for values in logs.values()]


def _variance(groups: Iterable[Sequence[float]]) -> float:
    """The variance within groups, by the median of the distances from each group's median (Hampel,
    "The influence curve and its role in robust estimation", 1974), which a step that something else
    held up does not move.
    """
    distances: list[float] = []
    for values in groups:
        number = len(values)
        if number > 1:
            middle = median(values)
            from_it = sorted(abs(value - middle) for value in values)
            scale = math.sqrt(number / (number - 1))
            distances += [scale * d for d in from_it[number % 2 :]]  # not the middle one's own
    return (1.4826 * median(distances)) ** 2 if distances else 0.0


def _of_median(variance: float, values: Sequence[object]) -> float:
    """The variance of the median of values that vary so."""
    return math.pi / 2 * variance / len(values)


def _factors(pairs: Mapping[int, tuple[_Block | None, _Block | None]]) -> dict[int, float]:
    """Return, by kind, the second one's time by the first one's."""
    logs, chances, sizes = {}, {}, {}
    for kind, (one, other) in pairs.items():
        if one is not None and other is not None and one.both and other.both:
            logs[kind] = math.log(other.both / one.both)
            chances[kind] = one.variance + other.variance
            sizes[kind] = one.both
    if not logs:
        return {}
    drawn = _drawn(list(logs.values()), list(chances.values()), list(sizes.values()))
    return {kind: math.exp(value) for kind, value in zip(logs, drawn, strict=True)}


def _drawn(
    values: Sequence[float], chances: Sequence[float], sizes: Sequence[float]
) -> list[float]:
    """The values, each with the variance of its error, shrunk towards their mean, and that towards
    0. Each counts by its size, the seconds that it is a factor of: the recompute of a block that
    does next to nothing takes many times its forward, and says nothing about the others.
    """
    count, whole = len(values), sum(sizes)
    shares = [size / whole for size in sizes]
    center = _sum(shares, values)
    spread = _sum(shares, [(value - center) ** 2 for value in values])
    real = max(0.0, spread * count / (count - 1) - _sum(shares, chances)) if count > 1 else 0.0
    if any(real + chance == 0 for chance in chances):  # nothing is chance
        return list(values)
    weights = [share / (real + chance) for share, chance in zip(shares, chances, strict=True)]
    total = sum(weights)
    mean = _sum(weights, values) / total
    chance_of_mean = _sum([weight**2 for weight in weights], chances) / total**2
    common = mean * max(0.0, 1 - chance_of_mean / mean**2) if mean else 0.0
    return [
        common + (value - mean) * real / (real + chance)
        for value, chance in zip(values, chances, strict=True)
    ]


def _sum(weights: Sequence[float], values: Sequence[float]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=True))
