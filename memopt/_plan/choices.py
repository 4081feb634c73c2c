"""The choices for one block that a plan may make.

Which parts of a block are regions depends on its class: see parts.py. Here these choices have
names that stand for them, and `Profile.allowed` says which parts they are for a block.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from memopt._extension import HAS_NATIVE
from memopt.assignment import Choice

ONLY_RECIPES = Choice(recipes=HAS_NATIVE)
"""Recipes alone, where there is the native library, which has them."""
_RECIPES = (False, True) if HAS_NATIVE else (False,)
CHOICES = tuple(Choice(recipes, checkpoint) for checkpoint in (False, True) for recipes in _RECIPES)
"""The choices without offloading or parts: keep, recipes, checkpoint, recipes inside a checkpoint.
(Recipes where there is the native library.)
"""
LEVELS = ("<few parts>", "<more parts>")
"""Names for sets of parts, the smaller one first."""
INSIDE = "<parts inside>"
"""The name for the parts that are regions inside a block's region."""
EACH = ""
"""A block that is a region inside one that it shares with others."""
CHUNKED = "<parts in chunks>"
"""The name for the parts that are regions in chunks of rows, where the block has such."""

LEAST = replace(ONLY_RECIPES, checkpoint=True)
"""The choice that keeps least between forward and backward."""
WITH_PARTS = (
    *(Choice(recipes, parts=(level,)) for level in LEVELS for recipes in _RECIPES),
    replace(LEAST, parts=(INSIDE,)),
)
IN_CHUNKS = (
    replace(ONLY_RECIPES, parts=(CHUNKED,)),
    replace(LEAST, parts=(CHUNKED,)),
    replace(LEAST, parts=(INSIDE, CHUNKED)),
)
SHARING = (
    *(
        Choice(recipes, checkpoint=True, parts=parts)
        for parts in ((), (EACH,))
        for recipes in _RECIPES
    ),
    replace(LEAST, parts=(EACH, INSIDE)),
    replace(LEAST, parts=(EACH, CHUNKED)),
    replace(LEAST, parts=(EACH, INSIDE, CHUNKED)),
)
"""Choices for consecutive calls that share one region."""
_SHARES = (0.25, 0.5, 0.75, 1.0)


@cache
def choices_with(offload: bool) -> tuple[Choice, ...]:
    """All that a plan may choose from for one call, where its block has the parts."""
    alone = (*CHOICES, *WITH_PARTS, *IN_CHUNKS)
    if not offload:
        return alone
    away = [
        replace(choice, offload=share)
        for choice in alone
        for share in ((1.0,) if choice.checkpoint or choice.parts else _SHARES)
    ]
    return (*alone, *away)


@cache
def sharing_with(offload: bool) -> tuple[Choice, ...]:
    """All that a plan may choose from for calls that share a region, which the native library
    makes.
    """
    if not HAS_NATIVE:
        return ()
    return (*SHARING, *(replace(choice, offload=1.0) for choice in SHARING if offload))


def inside(choice: Choice) -> Choice:
    """Give the choice of a call by itself while the region that it shares is recomputed."""
    parts = tuple(part for part in choice.parts if part != EACH)
    return replace(choice, checkpoint=EACH in choice.parts, parts=parts, offload=0.0)
