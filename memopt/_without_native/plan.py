"""The planner's solver in Python, for choices that offload nothing.

The formulas are those of csrc/plan/timeline.h, the search that of csrc/plan/front.h: dynamic
programming over the stages, in which a beginning of a plan is dropped where another one has taken
less time, reached a lower peak and holds less.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from memopt._without_native.missing import NativeLibraryMissing

# Times in whole units, so that sums do not depend on their order.
_TICKS = 1 << 40
_MOST_LABELS = 2000
_MOST = 2**63


class _Choice(NamedTuple):
    resident: int
    forward: int
    backward: int
    ticks: int


class _Label(NamedTuple):
    """The choices of the first stages, by what they cost."""

    ticks: int
    peak: int
    held: int
    choices: tuple[int, ...]


class PlanFront:
    """The plans worth having, from the least peak to the least time."""

    def __init__(self, plans: Sequence[_Label], grid: int, most_labels: int) -> None:
        self._plans = plans
        self.grid = grid
        self.floor_grid = 0
        self.most_labels = most_labels

    def __len__(self) -> int:
        return len(self._plans)

    def within(self, budget: int) -> list[int] | None:
        """The choices of the fastest plan within the budget; None below the floor."""
        place = bisect.bisect_right([plan.peak for plan in self._plans], budget)
        return list(self._plans[place - 1].choices) if place else None

    @property
    def floor(self) -> int:
        """The least peak."""
        return self._plans[0].peak

    @property
    def fastest(self) -> int:
        """The peak of the plan that takes the least time."""
        return self._plans[-1].peak


class PlanChain:
    """A problem of memopt._plan.solver, checked."""

    def __init__(
        self,
        *,
        stages: list[tuple[int, list[tuple[int, int, int, float, float, int]]]],
        base: int,
        optimizer: int,
        link: tuple[float, float, int, int],
    ) -> None:
        self._base, self._optimizer = base, optimizer
        self._stages: list[list[_Choice]] = []
        if not stages:
            raise ValueError("plan: stages must have at least one, got none")
        _check("base", base)
        _check("optimizer", optimizer)
        for i, (before_backward, choices) in enumerate(stages):
            _check(f"stage {i}: before_backward", before_backward)
            if not choices:
                raise ValueError(f"plan: stage {i} must have a choice, got none")
            self._stages.append(
                [
                    _checked(f"stage {i}, choice {c}", *n, before_backward)
                    for c, n in enumerate(choices)
                ]
            )

    def front(self, most_labels: int = _MOST_LABELS) -> PlanFront:
        """Find the plans worth having, of all budgets."""
        ahead = self._least_peaks()
        lowest = max(self._base + self._optimizer, self._base + ahead[0])
        labels = [_Label(0, lowest, 0, ())]
        # What a plan of least peak may hold at each stage is found before labels are merged.
        most, grid = 1, 0
        for i, stage in enumerate(self._stages):
            grown = [
                self._extended(label, number, choice, ahead[i + 1])
                for label in labels
                for number, choice in enumerate(stage)
            ]
            labels = _not_dominated(grown)
            while len(labels) > most_labels:
                grid = max(1, grid * 2)
                labels = _merged(labels, grid, lowest)
            most = max(most, len(labels))
        plans = sorted(labels, key=lambda label: (label.peak, label.ticks))
        worth: list[_Label] = []
        for plan in plans:
            if not worth or plan.ticks < worth[-1].ticks:
                worth.append(plan)
        return PlanFront(worth, grid, most)

    def evaluate(self, choices: Sequence[int]) -> dict[str, Any]:
        """The bytes and the seconds of a plan: the fields of memopt._plan.solver.Timeline."""
        if len(choices) != len(self._stages):
            raise ValueError(
                f"plan: choices must be one for each of {len(self._stages)} stages, "
                f"got {len(choices)}"
            )
        held, ticks = self._base, 0
        forward, backward = [], []
        for i, (stage, number) in enumerate(zip(self._stages, choices, strict=True)):
            if not 0 <= number < len(stage):
                raise ValueError(
                    f"plan: choice of stage {i} must be below {len(stage)}, got {number}"
                )
            choice = stage[number]
            forward.append(held + choice.forward)
            backward.append(held + choice.backward)
            held += choice.resident
            ticks += choice.ticks
        optimizer = self._base + self._optimizer
        in_time: list[tuple[tuple[str, int | None], int]] = [
            *((("forward", i), peak) for i, peak in enumerate(forward)),
            *((("backward", i), backward[i]) for i in reversed(range(len(backward)))),
            (("optimizer", None), optimizer),
        ]
        peak_at, peak = max(in_time, key=lambda one: one[1])
        none = (0.0,) * len(choices)
        return {
            "choices": tuple(choices),
            "seconds": ticks / _TICKS,
            "wait_seconds": 0.0,
            "offloaded": 0,
            "peak": peak,
            "peak_at": peak_at,
            "forward_peaks": tuple(forward),
            "backward_peaks": tuple(backward),
            "optimizer_peak": optimizer,
            "forward_waits": none,
            "backward_waits": none,
        }

    def _least_peaks(self) -> list[int]:
        """The least peak of each stage and all later ones, above what is held when it begins. After
        the last one nothing comes.
        """
        least = [-_MOST]
        for stage in reversed(self._stages):
            ways = (max(c.forward, c.backward, c.resident + least[-1]) for c in stage)
            least.append(min(ways))
        return least[::-1]

    def _extended(self, label: _Label, number: int, choice: _Choice, ahead: int) -> _Label:
        """A beginning with one stage more. Its peak is raised to what it will reach in any case."""
        above = self._base + label.held
        held = label.held + choice.resident
        reached = max(above + choice.forward, above + choice.backward, self._base + held + ahead)
        return _Label(
            label.ticks + choice.ticks,
            max(label.peak, reached),
            held,
            (*label.choices, number),
        )


def _not_dominated(labels: list[_Label]) -> list[_Label]:
    """Drops every label that another one is at least as good as in ticks, peak and held."""
    kept: list[_Label] = []
    peaks: list[int] = []  # rising, of those kept so far; what they hold falls
    holds: list[int] = []
    for label in sorted(labels):
        place = bisect.bisect_right(peaks, label.peak)
        if place and holds[place - 1] <= label.held:
            continue
        kept.append(label)
        end = place
        while end < len(peaks) and holds[end] >= label.held:
            end += 1
        peaks[place:end] = [label.peak]
        holds[place:end] = [label.held]
    return kept


def _merged(labels: list[_Label], grid: int, lowest: int) -> list[_Label]:
    """Keeps the fastest labels: one of each cell of the grid, and one of those of least peak."""
    cells: dict[tuple[int, int], _Label] = {}
    cell: Callable[[_Label], tuple[int, int]] = lambda one: (one.peak // grid, one.held // grid)  # noqa: E731
    for label in sorted(labels):
        cells.setdefault((label.peak, -1) if label.peak == lowest else cell(label), label)
    return list(cells.values())


def _check(name: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        raise ValueError(f"plan: {name} must be at least 0 and finite, got {value}")


def _checked(
    name: str,
    resident: int,
    forward: int,
    backward: int,
    forward_seconds: float,
    backward_seconds: float,
    offloaded: int,
    before_backward: int,
) -> _Choice:
    for field, value in (
        ("resident", resident),
        ("forward", forward),
        ("backward", backward),
        ("forward_seconds", forward_seconds),
        ("backward_seconds", backward_seconds),
    ):
        _check(f"{name}: {field}", value)
    if offloaded:
        raise NativeLibraryMissing("plan(offload=)")
    ticks = round(forward_seconds * _TICKS) + round(backward_seconds * _TICKS)
    return _Choice(resident, forward, backward + before_backward, ticks)
