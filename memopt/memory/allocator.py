"""Bytes as allocators count them: what is alive, the most of it, and what is free, on any device.

    with LiveBytes() as live:                      on the CPU, at each allocation and its end
        loss = forward()
        live.mark()
        loss.backward()
    live.most, live.left, live.marks[0].nbytes

    with DeviceBytes(device) as found:             on an accelerator
        loss = forward()
    found.before, found.most, found.reserved

    most_above(device, run), free_bytes(device), capacity_of(device)    on both

On the CPU PyTorch tells of each allocation, as it would tell its profiler. Memory allocated before
does not count, nor does memory that an operator allocates and frees inside itself. No dispatch mode
is involved: under one, memopt's ops write over nothing (csrc/autograd/ownership.h), and need more
memory. An accelerator's allocator counts by itself, with scratch, and rounded up.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import starmap
from pathlib import Path
from typing import NamedTuple

import torch

from memopt._extension import _C


class Instant(NamedTuple):
    """The bytes that are allocated from this instant on."""

    ns: int
    """Nanoseconds since the beginning."""
    nbytes: int


class LiveBytes:
    """Counts the CPU memory that one thread allocates. Its results are set when it has ended. What
    other threads free of it (those of collectives) seems to be left.
    """

    timeline: list[Instant]
    """An instant after each allocation, and after each end of one; it begins with 0 bytes."""
    marks: list[Instant]
    """An instant for each call of `mark`."""
    most_with_scratch: int
    """The most bytes at any time, with what operators allocate and free inside themselves."""

    def __init__(self) -> None:
        self._allocations = _C.Allocations()

    @property
    def most(self) -> int:
        """The most bytes at any time."""
        return max(instant.nbytes for instant in self.timeline)

    @property
    def left(self) -> int:
        """Bytes that are still allocated at the end."""
        return self.timeline[-1].nbytes

    def mark(self) -> None:
        """Notes this moment."""
        self._allocations.mark()

    def __enter__(self) -> LiveBytes:
        self._allocations.start()
        return self

    def __exit__(self, *error: object) -> None:
        found, (begin, *marks) = self._allocations.stop()
        events = sorted(starmap(_Event, found), key=lambda event: event.ns)
        self.timeline = _timeline(begin, events)
        with_scratch = _timeline(begin, events, with_scratch=True)
        self.most_with_scratch = max(instant.nbytes for instant in with_scratch)
        self.marks = [Instant(ns - begin, _bytes_at(self.timeline, ns - begin)) for ns in marks]


class DeviceBytes:
    """Reads an accelerator's allocator, whose peak is reset when this context is entered."""

    before: int
    """Bytes that were allocated when it was entered."""
    most: int
    """The most bytes allocated at any time until it ended, `before` included."""
    reserved: int
    """The most bytes that the allocator had reserved on the device until then."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)

    @property
    def now(self) -> int:
        """Bytes that are allocated now, beyond those before."""
        return allocated_bytes(self._device) - self.before

    @property
    def above(self) -> int:
        """The most bytes beyond those before."""
        return self.most - self.before

    def __enter__(self) -> DeviceBytes:
        torch.accelerator.synchronize(self._device)
        self.before = allocated_bytes(self._device)
        torch.accelerator.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *error: object) -> None:
        torch.accelerator.synchronize(self._device)
        self.most = torch.accelerator.max_memory_allocated(self._device)
        self.reserved = torch.accelerator.max_memory_reserved(self._device)


def most_above(device: torch.device, run: Callable[[], object]) -> int:
    """The most bytes at any time of a call, beyond those that were allocated before."""
    if device.type == "cpu":
        with LiveBytes() as live:
            run()
        return live.most
    with DeviceBytes(device) as found:
        run()
    return found.above


def allocated_bytes(device: torch.device) -> int:
    """Bytes that an accelerator's allocator has given out; 0 on the CPU, whose does not say."""
    if device.type == "cpu":
        return 0
    return torch.accelerator.memory_allocated(device)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that could be allocated on a device; None where that is not known."""
    if device.type == "cpu":
        return _on_host("MemAvailable")
    try:
        free, _ = torch.accelerator.get_memory_info(device)
    except (RuntimeError, NotImplementedError):  # an allocator that does not say
        return None
    unused = torch.accelerator.memory_reserved(device) - allocated_bytes(device)
    return int(free + unused)


def capacity_of(device: torch.device | str) -> int | None:
    """All bytes of a device's memory; None where that is not known, or there is no such device."""
    device = torch.device(device)
    if device.type == "cpu":
        return _on_host("MemTotal")
    try:
        _, capacity = torch.accelerator.get_memory_info(device)
    except (RuntimeError, ValueError, NotImplementedError, AssertionError):
        return None
    return int(capacity)


def _on_host(line: str) -> int | None:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return 1024 * int(lines[line].split()[0])


class _Event(NamedTuple):
    """An allocation (nbytes > 0), or the end of one (nbytes < 0)."""

    ns: int
    address: int
    nbytes: int
    operator: int
    """The outermost operator that was running; 0: none."""


def _timeline(begin: int, events: list[_Event], *, with_scratch: bool = False) -> list[Instant]:
    begun: dict[int, int] = {}  # by address, the place in the list of what is allocated there
    scratch: set[int] = set()  # these places, where an operator freed what it had allocated
    for place, (_, address, nbytes, operator) in enumerate(events):
        if nbytes > 0:
            begun[address] = place
        elif address in begun:
            beginning = begun.pop(address)
            if not with_scratch and operator and operator == events[beginning].operator:
                scratch.add(beginning)
    live: dict[int, int] = {}
    total = 0
    timeline = [Instant(0, 0)]
    for place, (ns, address, nbytes, _) in enumerate(events):
        if nbytes < 0:
            total -= live.pop(address, 0)
        elif place not in scratch:
            live[address] = nbytes
            total += nbytes
        timeline.append(Instant(ns - begin, total))
    return timeline


def _bytes_at(timeline: list[Instant], ns: int) -> int:
    return [instant.nbytes for instant in timeline if instant.ns <= ns][-1]
