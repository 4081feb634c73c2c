"""Waiting for what other threads still have to let go of."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 20.0  # of a busy machine


def once_it_is(expected: T, read: Callable[[], T], seconds: float = PATIENCE_S) -> T:
    """What `read` returns as soon as that is `expected`, and after the time whatever it is. For
    counts of what a thread holds that others have no way to wait for.
    """
    deadline = time.monotonic() + seconds
    while (found := read()) != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return found
