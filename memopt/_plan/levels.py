"""Removes from a block's times the effects of its place in a step, and of the moment when the step
ran, so that choices can be compared.

If the machine does something else, it is slower for some seconds, which is longer than a round of
steps, in which each choice has its turn. And blocks of one kind do the same work in different
times: the first one finds other data in the caches than the last one. So
log t = round + block + choice + chance. The effects are those with the least sum of absolute
deviations, on which one delayed step has no influence, by least squares weighted with
1 / deviation, repeated (Schlossmacher, "An iterative technique for absolute deviations curve
fitting", 1973). If the measured times leave something open, rounds and blocks take the least of it:
where blocks had only one choice each, their differences count as the choice's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt._plan.seconds import StageSeconds
from memopt.assignment import Choice

_STEPS = 20
_LEAST = 1e-4
"""Deviations of less weigh no more: they are beyond what a clock tells."""
_PENALTY = 1e-6
"""The penalty on effects of rounds and blocks, so small that it decides only what measured times
leave open."""


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
    """Return the times as of one round, each block of a kind as if it stood at their mean place."""
    timed = list(timed)
    forward = _levels(timed, [one.seconds.forward for one in timed])
    backward = _levels(timed, [one.seconds.backward for one in timed])
    samples: dict[Case, list[Sample]] = defaultdict(list)
    for one, *stages in zip(timed, forward, backward, strict=True):
        samples[one.case].append(Sample(stages[0], stages[1], one.round))
    return samples


def _levels(timed: Sequence[Timed], seconds: Sequence[float]) -> list[float]:
    """Divide out of seconds what is their call's and their round's own."""
    places = [place for place, value in enumerate(seconds) if value > 0]  # others have no backward
    levels = list(seconds)
    if not places:
        return levels
    # On the CPU, whatever the default device.
    values = [math.log(seconds[place]) for place in places]
    logs = torch.tensor(values, dtype=torch.float64, device="cpu")
    mine = [timed[place] for place in places]
    calls, rounds = _columns([one.call for one in mine]), _columns([one.round for one in mine])
    own = torch.cat([calls, rounds], 1)
    design = torch.cat([own, _columns([one.case for one in mine])], 1)
    number = own.shape[1]
    penalty = _PENALTY * torch.diag(torch.arange(design.shape[1], device="cpu") < number).double()
    weights = torch.ones_like(logs)
    for _ in range(_STEPS):
        weighted = design.T * weights
        effects = torch.linalg.solve(weighted @ design + penalty, weighted @ logs)
        weights = 1 / (logs - design @ effects).abs().clamp(min=_LEAST)
        weights /= weights.mean()
    for place, level in zip(places, (logs - own @ effects[:number]).exp().tolist(), strict=True):
        levels[place] = level
    return levels


def _columns(groups: Sequence[Hashable]) -> Tensor:
    """Make a column for each group, with 1 where an entry belongs to it."""
    numbers: dict[Hashable, int] = {}
    places = [numbers.setdefault(group, len(numbers)) for group in groups]
    return F.one_hot(torch.tensor(places, device="cpu")).double()
