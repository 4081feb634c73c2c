"""The choices for one block that a plan may make."""

from __future__ import annotations

from memopt.assignment import Choice

CHOICES = tuple(
    Choice(recipes, checkpoint) for checkpoint in (False, True) for recipes in (False, True)
)
"""The choices without offloading: keep, recipes, checkpoint, recipes inside a checkpoint."""
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
