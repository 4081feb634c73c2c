"""Takes out of a block's times what is its place's in a step, and the minute's, so that choices can
be compared.

A machine that does something else takes longer for some seconds, which is longer than a round of
steps, in which each choice has its turn. A round's share is the median of log t less the median of
all rounds, over its blocks, each beside blocks of its kind that do the same.

Blocks of one kind do the same and take different times all the same: the first one finds other
things in the caches than the last one. So log t = block + choice + chance. The effects are those of
the least sum of absolute deviations, which a step that something else held up does not move, by
least squares weighted with 1 / deviation again and again (Schlossmacher, "An iterative technique
for absolute deviations curve fitting", 1973). What blocks that had one choice alone differ by is
taken for the choice's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt._plan.seconds import StageSeconds
from memopt.assignment import Choice

_ROUNDS = 20
_LEAST = 1e-4
"""Deviations of less weigh no more: they are beyond what a clock tells."""
_PENALTY = 1e-6
"""The penalty on a block's effect, so small that it decides only what measured times leave open."""


class Case(NamedTuple):
    """The work that a block of some kind does in a step."""

    kind: int
    choice: Choice
    is_beside: bool = False
    """Whether it has no recipes and others have. Then what it saves passes their hook."""


@dataclass(frozen=True)
class Sample(StageSeconds):
    """One call of a block in one step, with what is its round's and its place's taken out."""

    round: int = 0


Samples = Mapping[Case, Sequence[Sample]]


@dataclass(frozen=True)
class Timed:
    """One call of a block in one step."""

    call: int
    """The call's number in the step."""
    case: Case
    seconds: StageSeconds
    round: int = 0
    """The round of steps, in which every sample has its turn."""


def levelled(timed: Iterable[Timed]) -> Samples:
    """The times as of one round, and as if every block of a kind stood at their mean place."""
    timed = list(timed)
    there = _without_rounds(timed, [one.seconds.forward for one in timed])
    back = _without_rounds(timed, [one.seconds.backward for one in timed])
    kinds: dict[int, list[int]] = defaultdict(list)
    for number, one in enumerate(timed):
        kinds[one.case.kind].append(number)
    samples: dict[Case, list[Sample]] = defaultdict(list)
    for numbers in kinds.values():
        mine = [timed[number] for number in numbers]
        forward = _without_calls(mine, [there[number] for number in numbers])
        backward = _without_calls(mine, [back[number] for number in numbers])
        for one, *stages in zip(mine, forward, backward, strict=True):
            samples[one.case].append(Sample(stages[0], stages[1], one.round))
    return samples


def _without_rounds(timed: Sequence[Timed], seconds: Sequence[float]) -> list[float]:
    """Divide out of seconds what is their round's own."""
    logs: dict[Case, list[float]] = defaultdict(list)
    for one, value in zip(timed, seconds, strict=True):
        if value > 0:  # else a stage without a backward
            logs[one.case].append(math.log(value))
    middle = {case: median(values) for case, values in logs.items()}
    rounds: dict[int, list[float]] = defaultdict(list)
    for one, value in zip(timed, seconds, strict=True):
        if value > 0:
            rounds[one.round].append(math.log(value) - middle[one.case])
    slower = {number: math.exp(median(values)) for number, values in rounds.items()}
    pairs = zip(timed, seconds, strict=True)
    return [value / slower.get(one.round, 1.0) for one, value in pairs]


def _without_calls(timed: Sequence[Timed], seconds: Sequence[float]) -> list[float]:
    """Divide out of the seconds of one kind of blocks what is their call's own."""
    if any(value <= 0 for value in seconds):
        return list(seconds)  # a stage without a backward
    values = [math.log(value) for value in seconds]
    logs = torch.tensor(values, dtype=torch.float64, device="cpu")  # whatever the default device
    calls = _columns([one.call for one in timed])
    cases = _columns([one.case for one in timed])
    number = calls.shape[1]
    design = torch.cat([calls, cases], 1)
    penalty = _PENALTY * torch.diag(torch.arange(design.shape[1], device="cpu") < number).double()
    weights = torch.ones_like(logs)
    for _ in range(_ROUNDS):
        weighted = design.T * weights
        effects = torch.linalg.solve(weighted @ design + penalty, weighted @ logs)
        weights = 1 / (logs - design @ effects).abs().clamp(min=_LEAST)
    own = effects[:number]
    levels: list[float] = (logs - calls @ own + own.mean()).exp().tolist()
    return levels


def _columns(groups: Sequence[Hashable]) -> Tensor:
    """A column for each group, with 1 where an entry belongs to it."""
    numbers: dict[Hashable, int] = {}
    places = [numbers.setdefault(group, len(numbers)) for group in groups]
    return F.one_hot(torch.tensor(places, device="cpu")).double()
