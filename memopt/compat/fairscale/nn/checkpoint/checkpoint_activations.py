"""`fairscale.nn.checkpoint.checkpoint_activations`."""

from __future__ import annotations

from contextlib import AbstractContextManager

from memopt._checkpoint import (
    checkpoint_wrapper,
    disable_checkpointing,
    is_checkpointing,
    is_recomputing,
)
from memopt._checkpoint.flags import with_flag

__all__ = [
    "checkpoint_wrapper",
    "disable_checkpointing",
    "enable_checkpointing",
    "enable_recomputing",
    "is_checkpointing",
    "is_recomputing",
]


def enable_checkpointing() -> AbstractContextManager[None]:
    """Makes `is_checkpointing()` true in this scope and thread, for code that runs its own first
    forward. Regions that are called inside are as elsewhere.
    """
    return with_flag("checkpointing")


def enable_recomputing() -> AbstractContextManager[None]:
    """Makes `is_recomputing()` true in this scope and thread, for code that runs its own recompute.
    Regions that are called inside are part of it, and `is_checkpointing()` is false in them.
    """
    return with_flag("recomputing")
