"""Bytes that are allocated on the CPU over time, as the allocator itself says.

    with LiveBytes() as live:
        loss = forward()
        live.mark()
        loss.backward()
    live.most, live.left, live.marks[0].nbytes

PyTorch's profiler notes each allocation. What was there before counts for nothing, nor does what an
operator allocates and frees inside itself. No dispatch mode is involved: under one, memopt's ops
write over nothing (csrc/autograd/ownership.h), and need more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "memopt: mark"


class Instant(NamedTuple):
    """How much is allocated from here on."""

    ns: int
    """Nanoseconds since the beginning."""
    nbytes: int


class LiveBytes:
    """Of the CPU's memory, of one thread. What it found is there when it has ended."""

    timeline: list[Instant]
    """After each allocation, and after each end of one; it begins with 0 bytes."""
    marks: list[Instant]
    """At each call of `mark`."""

    @property
    def most(self) -> int:
        """The most bytes at any time."""
        return max(instant.nbytes for instant in self.timeline)

    @property
    def left(self) -> int:
        """Bytes that are still there at the end."""
        return self.timeline[-1].nbytes

    def mark(self) -> None:
        """Notes this moment."""
        with record_function(_MARK):
            pass

    def __enter__(self) -> LiveBytes:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        self.mark()
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.__exit__(*error)
        profiler = self._profile.profiler
        assert profiler is not None
        assert profiler.kineto_results is not None
        events = _Events()
        events.visit(profiler.kineto_results.experimental_event_tree())
        begin, *marks = sorted(events.marks)
        self.timeline = _timeline(begin, events.allocations)
        self.marks = [Instant(ns - begin, _bytes_at(self.timeline, ns - begin)) for ns in marks]


class _Allocation(NamedTuple):
    """Of nbytes > 0, or the end of one (nbytes < 0)."""

    ns: int
    address: int
    nbytes: int
    inside: frozenset[int]
    """The operators that were running."""


class _Events:
    def __init__(self) -> None:
        self.allocations: list[_Allocation] = []
        self.marks: list[int] = []

    def visit(self, events: list[Any], inside: frozenset[int] = frozenset()) -> None:
        for event in events:
            kind, fields = event.typed
            within = inside
            if kind == _EventType.Allocation:
                self.allocations.append(
                    _Allocation(event.start_time_ns, fields.ptr, fields.alloc_size, inside)
                )
            elif kind == _EventType.TorchOp:
                if event.name == _MARK:
                    self.marks.append(event.start_time_ns)
                elif event.name.startswith(("memopt::_", "aten::")):
                    within = inside | {event.id}
            self.visit(event.children, within)


def _timeline(begin: int, allocations: list[_Allocation]) -> list[Instant]:
    allocations = sorted(allocations, key=lambda allocation: allocation.ns)
    begun: dict[int, int] = {}  # by address, the place in the list of what is allocated there
    scratch: set[int] = set()  # these places, where an operator freed what it had allocated
    for place, (_, address, nbytes, inside) in enumerate(allocations):
        if nbytes > 0:
            begun[address] = place
        elif address in begun:
            beginning = begun.pop(address)
            if inside & allocations[beginning].inside:
                scratch.add(beginning)
    live: dict[int, int] = {}
    total = 0
    timeline = [Instant(0, 0)]
    for place, (ns, address, nbytes, _) in enumerate(allocations):
        if nbytes < 0:
            total -= live.pop(address, 0)
        elif place not in scratch:
            live[address] = nbytes
            total += nbytes
        timeline.append(Instant(ns - begin, total))
    return timeline


def _bytes_at(timeline: list[Instant], ns: int) -> int:
    return [instant.nbytes for instant in timeline if instant.ns <= ns][-1]
