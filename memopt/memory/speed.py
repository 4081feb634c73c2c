"""Estimates how long work takes on a GPU of today, whose ratios matter more than its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from memopt.memory.step import Step

_FLOPS = {2: 400e12, 4: 50e12, 8: 25e12}
"""Operations a second, by an element's bytes."""

_LAUNCH = 5e-6
"""Seconds of the host for an operator on CUDA: the launch of its kernel, and PyTorch's call of it.

Source: ranges that are often given, and were not measured here: 2.5 to 5 microseconds for a launch
by CUDA, 5 to 10 for an operator of eager PyTorch. The least of the latter is a floor: operators of
more than one kernel take more.
"""


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
    launch: float = 0.0
    """Seconds that no operator falls below."""

    def seconds(self, work: Amount, operators: int = 1) -> float:
        """The seconds of so many operators' work: those of the device, or of the host where that is
        slower.
        """
        host = operators * self.launch
        return max(work.flops / self.flops, work.nbytes / self.nbytes, host)


def speed_of(step: Step, target: str | None = None) -> Speed:
    """The speed for the dtype that the step computes in.

    Args:
        target: the type of the device that the step is for; "cuda" adds the time of launches.
    """
    dtype = step.autocast or next(step.model.parameters()).dtype
    launch = _LAUNCH if target == "cuda" else 0.0
    return Speed(_FLOPS.get(dtype.itemsize, _FLOPS[2]), launch=launch)
