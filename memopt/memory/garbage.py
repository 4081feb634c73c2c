"""Python's garbage collector, off for a while."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Turns the collector off, for what notes much and drops nothing: it would look through all of
    that again and again. (A quarter of a predicted step's time.)
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
