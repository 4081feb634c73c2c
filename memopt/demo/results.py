"""Results of one mode's training, and how its losses compare with another mode's."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from memopt.demo.memory import MemoryProfile
from memopt.demo.modes import Mode


@dataclass
class Result:
    """Filled while the mode trains, so that an interruption leaves what there is."""

    mode: Mode
    tokens_per_step: int
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    """Forward, backward and optimizer, to the moment the loss is known on the host."""
    memory: MemoryProfile | None = None
    failure: str | None = None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.median_ms * 1e3


@dataclass(frozen=True)
class Agreement:
    """Two modes' losses over the steps that both have trained."""

    reference: str
    promised: bool
    """The modes run the same kernels, so any difference is a fault."""
    steps: int
    largest_difference: float

    @property
    def equal(self) -> bool:
        return self.largest_difference == 0


def agreement(result: Result, results: list[Result]) -> Agreement | None:
    """Compares a result with its mode's reference; None if that mode was not run, or has none."""
    promised = result.mode.reference is not None
    name = result.mode.reference or "eager"
    reference = next((other for other in results if other.mode.name == name), None)
    if reference is None or reference is result:
        return None
    pairs = list(zip(result.losses, reference.losses, strict=False))
    if not pairs:
        return None
    return Agreement(name, promised, len(pairs), max(_difference(a, b) for a, b in pairs))


def _difference(a: float, b: float) -> float:
    """|a - b|; two losses that are both NaN are no difference, one alone is an infinite one."""
    if a == b or (a != a and b != b):
        return 0.0
    difference = abs(a - b)
    return difference if difference == difference else float("inf")
