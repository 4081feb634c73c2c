"""The times that regions run, measured by waiting for the device at their borders."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch

Pass = Literal["forward", "recompute"]

_log = logging.getLogger("memopt.compat.deepspeed")


@dataclass(frozen=True)
class Timings:
    """The calls and seconds of all regions since `profile` was configured or they were reset."""

    forward_calls: int = 0
    forward_seconds: float = 0.0
    recompute_calls: int = 0
    recompute_seconds: float = 0.0


class Clock:
    """Adds up the times of the regions' passes, and logs each."""

    def __init__(self) -> None:
        self._timings = Timings()
        self._lock = threading.Lock()

    def read(self, reset: bool) -> Timings:
        """The times so far."""
        with self._lock:
            timings = self._timings
            if reset:
                self._timings = Timings()
        return timings

    @contextmanager
    def time(self, name: Pass) -> Iterator[None]:
        """Times the code inside as one pass, until the accelerator has finished too."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            synchronize()
            seconds = time.perf_counter() - begin
            with self._lock:
                timings = self._timings
                calls, total = f"{name}_calls", f"{name}_seconds"
                self._timings = replace(
                    timings,
                    **{
                        calls: getattr(timings, calls) + 1,
                        total: getattr(timings, total) + seconds,
                    },
                )
            _log.info("%s of a region: %.3f ms", name, seconds * 1e3)


@contextmanager
def synchronized() -> Iterator[None]:
    """The device has done all work at both ends."""
    synchronize()
    try:
        yield
    finally:
        synchronize()


def synchronize() -> None:
    """Wait for the current accelerator, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
