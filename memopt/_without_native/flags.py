"""The calling thread's state, as csrc/saved/flags.h has it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass
class Flags:
    """Whether a thread is in a region's first forward, in its recompute, or makes no regions."""

    checkpointing: bool = False
    recomputing: bool = False
    disabled: bool = False


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.flags = Flags()


_here = _OfThread()


def flags() -> Flags:
    """A copy of the thread's flags as they are now."""
    return replace(_here.flags)


def set_flags(flags: Flags) -> Flags:
    """Set the thread's flags; returns what they were before."""
    before = _here.flags
    _here.flags = replace(flags)
    return before
