"""Where the calling thread is: in a region's first forward, in its recompute, or in neither.

The flags belong to a thread, because backward may run in another thread than forward did, and one
thread may recompute a region while another still runs its forward.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Flags(threading.local):
    checkpointing = False
    recomputing = False
    disabled = False


_flags = _Flags()


def is_checkpointing() -> bool:
    """Whether this thread is inside the first forward of a region.

    Code that is run again in backward can use it together with `is_recomputing` to act once only.
    """
    return _flags.checkpointing


def is_recomputing() -> bool:
    """Whether this thread is inside a region that backward is running again.

    A region that is nested in one that is recomputed is part of that recompute: there,
    `is_checkpointing` is False and `is_recomputing` is True.
    """
    return _flags.recomputing


def is_disabled() -> bool:
    """Whether this thread is inside `disable_checkpointing`."""
    return _flags.disabled


@contextmanager
def disable_checkpointing() -> Iterator[None]:
    """In this scope and thread, calls of regions and wrapped modules are plain calls.

    It is the call that counts: regions that were entered before keep recomputing in backward.
    """
    with flags_set(
        checkpointing=_flags.checkpointing, recomputing=_flags.recomputing, disabled=True
    ):
        yield


@contextmanager
def flags_set(*, checkpointing: bool, recomputing: bool, disabled: bool) -> Iterator[None]:
    """Set this thread's flags in a scope and put them back at its end, however it ends."""
    before = _flags.checkpointing, _flags.recomputing, _flags.disabled
    _flags.checkpointing, _flags.recomputing, _flags.disabled = checkpointing, recomputing, disabled
    try:
        yield
    finally:
        _flags.checkpointing, _flags.recomputing, _flags.disabled = before
