"""The calling thread's state: in a region's first forward, in its recompute, or in neither.

The flags belong to a thread, because backward may run in another thread than forward did, and one
thread may recompute a region while another still runs its forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from memopt._extension import _C


def is_checkpointing() -> bool:
    """Whether this thread is inside the first forward of a region.

    Code that is recomputed in backward can use it together with `is_recomputing` to act only once.
    """
    return _C.flags().checkpointing


def is_recomputing() -> bool:
    """Whether this thread is inside a region that backward is recomputing.

    A region that is nested in one that is recomputed is part of that recompute: there,
    `is_checkpointing` is False and `is_recomputing` is True.
    """
    return _C.flags().recomputing


@contextmanager
def disable_checkpointing() -> Iterator[None]:
    """Makes calls of regions and wrapped modules plain calls, in this scope and thread.

    The call counts: regions that were entered before are still recomputed in backward.
    """
    with with_flag("disabled"):
        yield


@contextmanager
def with_flag(name: Literal["checkpointing", "recomputing", "disabled"]) -> Iterator[None]:
    """Sets the flag in this scope and thread."""
    flags = _C.flags()
    setattr(flags, name, True)
    before = _C.set_flags(flags)
    try:
        yield
    finally:
        _C.set_flags(before)
