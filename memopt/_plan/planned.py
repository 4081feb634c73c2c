"""A plan's contents: the choice of each block, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from memopt._plan.choose import Chosen
from memopt._plan.groups import group_option
from memopt._plan.profile import Profile
from memopt._plan.solver import Option
from memopt._plan.terms import Terms
from memopt.assignment import KEEP, Assignment, Choice
from memopt.memory.trace import Trace


@dataclass(frozen=True)
class PlannedBlock:
    """One line of a plan."""

    path: str
    choice: Choice
    kept: int
    """Bytes that are held from its forward to its backward; of all its calls."""
    saved: int
    """Fewer than without the plan."""
    away: int
    """Bytes that wait elsewhere."""
    seconds: float
    """Seconds of its forward and backward, with the recompute."""
    added: float
    """More than without the plan."""
    together: tuple[str, ...] = ()
    """The blocks that share a region with it, itself among them; empty: it shares none. What the
    region keeps counts for the first of them, and the time is shared."""


@dataclass
class Planned:
    """A choice for each block, and what it was made of."""

    model: str
    """The class that it was made for."""
    budget: int
    blocks: tuple[PlannedBlock, ...]
    peak: int
    """Bytes of the step's peak, predicted."""
    seconds: float
    """Seconds of forward and backward, with waits for copies."""
    plain_peak: int
    """The peak without the plan."""
    plain_seconds: float
    measured_peak: int | None
    """The peak with the plan on the model; None before `apply`."""
    is_timed: bool
    """Whether seconds are those of real steps. Else they are estimates for a GPU."""
    notes: tuple[str, ...]
    assignment: Assignment = field(repr=False)
    profile: Profile = field(repr=False)
    terms: Terms = field(repr=False)
    signature: dict[str, str] = field(repr=False)
    """The look that a model must have for the plan: its blocks' classes and parameters."""

    plain_trace: Trace | None = field(default=None, repr=False)
    trace: Trace | None = field(default=None, repr=False)
    """The step without the plan and with it, as predicted or watched, where nothing is offloaded;
    None of a plan that was loaded."""

    @property
    def added(self) -> float:
        """Time beyond the plain step's, as a share of it; below 0 where recipes are faster."""
        return self.seconds / self.plain_seconds - 1 if self.plain_seconds else 0.0


def planned_blocks(profile: Profile, chosen: Chosen) -> Iterator[PlannedBlock]:
    with_recipes = chosen.assignment.recipes
    calls: dict[str, list[int]] = {}
    for number, path in enumerate(profile.paths):
        calls.setdefault(path, []).append(number)
    shared = {at[0]: at for at in chosen.assignment.choices if len(at) > 1}
    group: Option | None = None
    together: tuple[str, ...] = ()
    for path in profile.blocks:
        choice = chosen.assignment.of(path)
        first = calls[path][0]
        if path in shared:
            together = shared[path]
            group = group_option(profile, first, len(together), choice, with_recipes=with_recipes)
        if path in together:
            assert group is not None
            mine = [_share_of(group, together, path)]
        else:
            mine = [profile.option(n, choice, with_recipes=with_recipes) for n in calls[path]]
        plain = [profile.option(number, KEEP, with_recipes=False) for number in calls[path]]
        seconds = sum(one.forward_seconds + one.backward_seconds for one in mine)
        yield PlannedBlock(
            path,
            choice,
            kept=sum(one.resident for one in mine),
            saved=sum(one.resident for one in plain) - sum(one.resident for one in mine),
            away=sum(one.offloaded for one in mine),
            seconds=seconds,
            added=seconds - sum(one.forward_seconds + one.backward_seconds for one in plain),
            together=together if path in together else (),
        )


def _share_of(group: Option, together: tuple[str, ...], path: str) -> Option:
    count, is_first = len(together), path == together[0]
    return Option(
        resident=group.resident * is_first,
        offloaded=group.offloaded * is_first,
        forward_seconds=group.forward_seconds / count,
        backward_seconds=group.backward_seconds / count,
    )
