"""The lines of a plan: what became of each block, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memopt.plan.choice import KEEP, Choice
from memopt.plan.choose import Chosen
from memopt.plan.profile import Profile


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
    """Of its forward and backward, with what is computed again."""
    added: float
    """More than without the plan."""


def blocks_of(profile: Profile, chosen: Chosen) -> Iterator[PlannedBlock]:
    with_recipes = any(choice.recipes for choice in chosen.assignment.choices.values())
    for path in profile.blocks:
        choice = chosen.assignment.choices[path]
        calls = [number for number, other in enumerate(profile.paths) if other == path]
        mine = [profile.option(number, choice, with_recipes=with_recipes) for number in calls]
        plain = [profile.option(number, KEEP, with_recipes=False) for number in calls]
        seconds = sum(one.forward_seconds + one.backward_seconds for one in mine)
        yield PlannedBlock(
            path,
            choice,
            kept=sum(one.resident for one in mine),
            saved=sum(one.resident for one in plain) - sum(one.resident for one in mine),
            away=sum(one.offloaded for one in mine),
            seconds=seconds,
            added=seconds - sum(one.forward_seconds + one.backward_seconds for one in plain),
        )
