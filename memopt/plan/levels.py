"""Takes the place of a block in a step out of its times, so that choices can be compared.

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

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.plan.choice import Choice
from memopt.plan.seconds import StageSeconds

_ROUNDS = 20
_LEAST = 1e-4
"""Deviations of less weigh no more: they are beyond what a clock tells."""
_PENALTY = 1e-6
"""Of a block's effect, so small that it decides only what measured times leave open."""

Samples = Mapping[tuple[int, Choice], Sequence[StageSeconds]]
"""By kind of block and choice."""


@dataclass(frozen=True)
class Timed:
    """One call of a block in one step."""

    call: int
    """Its number in the step."""
    kind: int
    """Calls of one kind do the same."""
    choice: Choice
    seconds: StageSeconds


def levelled(timed: Iterable[Timed]) -> Samples:
    """The times as if every block of a kind stood at their mean place."""
    kinds: dict[int, list[Timed]] = defaultdict(list)
    for one in timed:
        kinds[one.kind].append(one)
    samples: dict[tuple[int, Choice], list[StageSeconds]] = defaultdict(list)
    for kind, mine in kinds.items():
        forward = _without_calls([(t.call, t.choice, t.seconds.forward) for t in mine])
        backward = _without_calls([(t.call, t.choice, t.seconds.backward) for t in mine])
        for one, there, back in zip(mine, forward, backward, strict=True):
            samples[kind, one.choice].append(StageSeconds(there, back))
    return samples


def _without_calls(entries: Sequence[tuple[int, Choice, float]]) -> list[float]:
    """Of seconds, each without what is its call's own."""
    if any(seconds <= 0 for *_, seconds in entries):
        return [seconds for *_, seconds in entries]  # a stage without a backward
    values = [math.log(seconds) for *_, seconds in entries]
    logs = torch.tensor(values, dtype=torch.float64, device="cpu")  # whatever the default device
    calls = _columns([call for call, *_ in entries])
    choices = _columns([choice for _, choice, _ in entries])
    number = calls.shape[1]
    design = torch.cat([calls, choices], 1)
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
