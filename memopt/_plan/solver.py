"""The planner's solver: which way to run each stage of a training step, under a budget of bytes.

A training step is a chain of stages: what is before the blocks, each block, head and loss. A stage
has some choices, each with its bytes and its seconds; a plan takes one of each stage. The formulas
are in csrc/plan/timeline.h, the dynamic programme that finds the plans in csrc/plan/front.h. It
finds those of all budgets at once, so that to ask again about an equal problem costs nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from memopt._extension import _C

__all__ = [
    "BelowFloor",
    "LinkTimes",
    "Option",
    "Problem",
    "Solution",
    "Stage",
    "Timeline",
    "evaluate",
    "evaluator",
    "floor",
    "solve",
    "worth",
]

_MOST = 2**63 - 1


@dataclass(frozen=True)
class Option:
    """One way to run a stage. Bytes of the device, at least 0; seconds, at least 0."""

    resident: int = 0
    """Held from its forward until its backward."""
    forward: int = 0
    """The most in its forward, above what was held when that began."""
    backward: int = 0
    """The most in its backward, above what the stages before it hold: what it holds itself, what it
    computes again and its gradients included."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    """Seconds of backward, with the recompute."""
    offloaded: int = 0
    """Leave in its forward and return in its backward. Not in `resident`; `forward` and `backward`
    count them."""


@dataclass(frozen=True)
class Stage:
    choices: tuple[Option, ...]
    before_backward: int = 0
    """Bytes that are there in its backward whatever is chosen, above the base: the gradients of the
    parameters of later stages."""


@dataclass(frozen=True)
class LinkTimes:
    """The link that carries offloaded bytes."""

    out: float
    """Bytes a second to where they go."""
    back: float
    """Bytes a second of the way back."""
    room: int = _MOST
    """The most that may be offloaded in all."""
    in_flight: int = _MOST
    """The most on its way out at one time: the computation waits for the rest."""


@dataclass(frozen=True)
class Problem:
    stages: tuple[Stage, ...]
    base: int = 0
    """Bytes that are there all the time: parameters, the optimizer's state."""
    optimizer: int = 0
    """The most in the optimizer's step, above the base, whatever is chosen."""
    link: LinkTimes | None = None
    """None: choices that offload are not taken."""


@dataclass(frozen=True)
class Timeline:
    """The time and bytes that a plan takes."""

    choices: tuple[int, ...]
    """The number of the choice of each stage."""
    seconds: float
    """Seconds of the step without the optimizer's, waits included."""
    wait_seconds: float
    offloaded: int
    """Bytes in all."""
    peak: int
    peak_at: tuple[str, int | None]
    """("forward", stage), ("backward", stage) or ("optimizer", None): the first one in time."""
    forward_peaks: tuple[int, ...]
    """The peak of the forward of each stage."""
    backward_peaks: tuple[int, ...]
    optimizer_peak: int
    forward_waits: tuple[float, ...]
    """Seconds that each stage waits for the link, which has too much on its way out."""
    backward_waits: tuple[float, ...]
    """Seconds that each stage waits for what it has offloaded to return."""
    groups: tuple[int, ...] = field(default=(), kw_only=True)
    """How many calls each stage but the first and the last one is of, where `choices` has a number
    for each call; empty: one each."""


@dataclass(frozen=True)
class Solution(Timeline):
    """The plan that the solver found."""

    grid: int
    """0: it is the best one. Else plans that differed by no more bytes than this were taken for one
    on the way, since there were too many; what is said of this plan is exact all the same."""
    labels: int
    """How many beginnings of plans were left at a stage, at the most."""


class BelowFloor(ValueError):
    """No plan fits in the budget."""

    def __init__(self, budget: int, solution: Solution) -> None:
        phase, stage = solution.peak_at
        where = phase if stage is None else f"{phase} of stage {stage}"
        super().__init__(
            f"no plan fits in a budget of {budget} bytes: the least is {solution.peak}, in {where}"
        )
        self.floor = solution.peak
        """The least budget that any plan needs."""
        self.solution = solution
        """The fastest plan that needs no more."""


def solve(problem: Problem, budget: int) -> Solution:
    """The plan of least time whose peak is within `budget` bytes; of those the one of least peak.

    So with a smaller budget the peak is never higher, and the time never less. Raises BelowFloor if
    no plan fits, ValueError where the problem has a number that cannot be (it names it).
    """
    chain, front = _front(problem)
    choices = front.within(_whole("budget", budget))
    if choices is None:
        raise BelowFloor(budget, floor(problem))
    return _solution(chain, front, choices, front.grid)


def floor(problem: Problem) -> Solution:
    """The plan of least peak; of those the fastest. Its peak is the least budget of any plan, for
    certain where its `grid` is 0.
    """
    chain, front = _front(problem)
    return _solution(chain, front, front.within(front.floor) or (), front.floor_grid)


def evaluate(problem: Problem, choices: Sequence[int]) -> Timeline:
    """Evaluate the plan of these choices, the index of one for each stage."""
    return evaluator(problem)(choices)


def worth(plan: Timeline, budget: int) -> tuple[bool, float, float]:
    """Less is better: within the budget the time counts, above it the bytes."""
    if plan.peak <= budget:
        return False, plan.seconds, plan.peak
    return True, plan.peak, plan.seconds


def evaluator(problem: Problem) -> Callable[[Sequence[int]], Timeline]:
    """`evaluate` for many plans of one problem."""
    chain = _chain(problem)
    return lambda choices: Timeline(**chain.evaluate(choices))


def _solution(
    chain: _C.PlanChain, front: _C.PlanFront, choices: Sequence[int], grid: int
) -> Solution:
    return Solution(**chain.evaluate(choices), grid=grid, labels=front.most_labels)


@lru_cache(maxsize=8)
def _front(problem: Problem) -> tuple[_C.PlanChain, _C.PlanFront]:
    chain = _chain(problem)
    return chain, chain.front()


def _chain(problem: Problem) -> _C.PlanChain:
    stages = []
    for i, stage in enumerate(problem.stages):
        name = f"stage {i}"
        before = _whole(f"{name}: before_backward", stage.before_backward)
        choices = [_numbers(f"{name}, choice {c}: ", v) for c, v in enumerate(stage.choices)]
        stages.append((before, choices))
    link = problem.link or LinkTimes(1.0, 1.0, room=0)
    return _C.PlanChain(
        stages=stages,
        base=_whole("base", problem.base),
        optimizer=_whole("optimizer", problem.optimizer),
        link=(
            float(link.out),
            float(link.back),
            _whole("link.room", link.room),
            _whole("link.in_flight", link.in_flight),
        ),
    )


def _numbers(name: str, choice: Option) -> tuple[int, int, int, float, float, int]:
    def whole(field: str) -> int:
        return _whole(name + field, getattr(choice, field))

    return (
        whole("resident"),
        whole("forward"),
        whole("backward"),
        float(choice.forward_seconds),
        float(choice.backward_seconds),
        whole("offloaded"),
    )


def _whole(name: str, value: int) -> int:
    """`value` as an int that the solver takes. It refuses negative ones itself."""
    try:
        whole = operator.index(value)
    except TypeError:
        raise ValueError(f"plan: {name} must be a whole number of bytes, got {value!r}") from None
    if not -_MOST <= whole <= _MOST:
        raise ValueError(f"plan: {name} must fit in 64 bits, got {whole}")
    return whole
