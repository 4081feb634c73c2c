"""The choices for one block that a plan may make."""

from __future__ import annotations

from memopt._extension import HAS_NATIVE
from memopt.assignment import Choice

CHOICES = tuple(
    Choice(recipes, checkpoint)
    for checkpoint in (False, True)
    for recipes in ((False, True) if HAS_NATIVE else (False,))
)
"""The choices without offloading: keep, recipes, checkpoint, recipes inside a checkpoint. (Recipes
where there is the native library.)
"""
_SHARES = (0.25, 0.5, 0.75, 1.0)


def choices_with(offload: bool) -> tuple[Choice, ...]:
    """All that a plan may choose from."""
    if not offload:
        return CHOICES
    away = [
        Choice(choice.recipes, choice.checkpoint, share)
        for choice in CHOICES
        for share in ((1.0,) if choice.checkpoint else _SHARES)
    ]
    return (*CHOICES, *away)
