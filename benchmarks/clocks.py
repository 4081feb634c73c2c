"""How one call is timed, on the CPU and on a CUDA device, and how fast a plain copy is there."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

Thunk = Callable[[], object]


class Clock(Protocol):
    """Times calls; `sample` returns seconds per call."""

    def calibrate(self, fn: Thunk, min_seconds: float) -> int:
        """The number of calls that one sample needs to last about `min_seconds`; at least 1."""

    def sample(self, fn: Thunk, calls: int) -> float:
        """Seconds per call of `fn`, over `calls` calls."""

    def copy_bandwidth(self) -> float:
        """Bytes read and written per second by a copy that is far larger than any cache."""


def processor_seconds() -> float:
    """The seconds that this process, and those of its children that have ended, took so far."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


class CpuClock:
    """Wall-clock time of a loop of calls: allocation, dispatch and Python's call are part of it."""

    def calibrate(self, fn: Thunk, min_seconds: float) -> int:
        calls = 1
        while True:
            per_call = self.sample(fn, calls)
            if per_call * calls >= min_seconds / 4:
                return max(1, round(min_seconds / per_call))
            calls *= 4

    def sample(self, fn: Thunk, calls: int) -> float:
        if calls > 1:
            fn()  # brings back the caches that the previous variant filled with its own tensors
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        return (time.perf_counter() - start) / calls

    def copy_bandwidth(self) -> float:
        source = torch.ones(1 << 26)  # 256 MiB
        target = torch.zeros_like(source)
        seconds = min(self.sample(lambda: target.copy_(source), 1) for _ in range(7))
        return 2 * source.nbytes / seconds


class CudaClock:
    """Device time of single calls between events, each on a cold L2 cache.

    Before each call a buffer larger than L2 is overwritten, and the device is kept busy for longer
    than the host needs to queue the call: so the events enclose kernels and not the host's launch
    time. A sample is the median of its calls.
    """

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._flush = torch.empty(4 * properties.L2_cache_size, dtype=torch.uint8, device=device)
        self._cycles_per_second = 1e3 * getattr(properties, "clock_rate", 2_000_000)  # in kHz
        # Weak: a variant's tensors go with its case.
        self._host_seconds: WeakKeyDictionary[Thunk, float] = WeakKeyDictionary()

    def calibrate(self, fn: Thunk, min_seconds: float) -> int:
        torch.cuda.synchronize()
        start = time.perf_counter()
        fn()
        self._host_seconds[fn] = time.perf_counter() - start
        torch.cuda.synchronize()
        per_call = self.sample(fn, 3)
        return min(50, max(3, round(min_seconds / per_call)))

    def sample(self, fn: Thunk, calls: int) -> float:
        wait_cycles = int(1.5 * self._host_seconds.get(fn, 1e-4) * self._cycles_per_second)
        events = [(self._event(), self._event()) for _ in range(calls)]
        for start, end in events:
            self._flush.zero_()
            torch.cuda._sleep(wait_cycles)  # type: ignore[no-untyped-call]
            start.record()
            fn()
            end.record()
        torch.cuda.synchronize()
        milliseconds: list[float] = [start.elapsed_time(end) for start, end in events]
        return statistics.median(milliseconds) / 1e3

    @staticmethod
    def _event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def copy_bandwidth(self) -> float:
        source = torch.ones(1 << 28, device=self._flush.device)  # 1 GiB
        target = torch.zeros_like(source)
        return 2 * source.nbytes / self.sample(lambda: target.copy_(source), 20)


class StepClock(CpuClock):
    """Wall-clock time of steps, each sample from an idle device to an idle device. On the CPU a
    step of the same way goes before it, as in training: it brings back the caches.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def sample(self, fn: Thunk, calls: int) -> float:
        if self.device.type == "cpu":
            fn()
        finish(self.device)
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        finish(self.device)
        return (time.perf_counter() - start) / calls


def finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def make_clock(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def keep_freed_memory() -> bool:
    """Ask the C library to keep what is freed for the next allocation, as CUDA's caching allocator
    does.

    glibc gives a freed block of more than 32 MiB back to the system and faults in fresh zeroed
    pages at the next allocation, which then costs as much as the kernel that is being measured.
    Returns whether that worked: only glibc has the call.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(m_mmap_max, 0) and libc.mallopt(m_trim_threshold, -1))


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Python's cycle collector off, so that it does not run inside a sample."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
