"""Estimates how long work takes on a GPU of today, whose ratios matter more than its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from memopt.memory.step import Step

_FLOPS = {2: 400e12, 4: 50e12, 8: 25e12}
"""Operations a second, by an element's bytes."""


class Amount(Protocol):
    """An amount of work."""

    @property
    def flops(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Speed:
    """The speed of a device."""

    flops: float
    """Operations a second, of contractions."""
    nbytes: float = 2.5e12
    """Bytes a second, of its own memory."""
    link: float = 50e9
    """Bytes a second, to the host and back."""

    def seconds(self, work: Amount) -> float:
        return max(work.flops / self.flops, work.nbytes / self.nbytes)


def speed_of(step: Step) -> Speed:
    """The speed for the dtype that the step computes in."""
    dtype = step.autocast or next(step.model.parameters()).dtype
    return Speed(_FLOPS.get(dtype.itemsize, _FLOPS[2]))
