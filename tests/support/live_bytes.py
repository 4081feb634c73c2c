"""Counts the bytes that are allocated at one time, as the allocator itself says.

    with LiveBytes() as live:
        output.backward()
    live.most

What was there before counts for nothing, nor does what an operator allocates and frees inside
itself. No dispatch mode is involved: under one, ops write over nothing (csrc/autograd/ownership.h).
"""

from __future__ import annotations

from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


class LiveBytes:
    """On the CPU, of one thread. When it has ended: `most`, and `left`, what is still there."""

    def __enter__(self) -> LiveBytes:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.__exit__(*error)
        tree = self._profile.profiler.kineto_results.experimental_event_tree()
        self.most, self.left = _most_and_last(_allocations(tree))


# An allocation (bytes > 0) or its end (bytes < 0), at an address, inside operators.
Allocation = tuple[int, int, int, frozenset[int]]


def _allocations(tree: list[Any]) -> list[Allocation]:
    found: list[Allocation] = []

    def visit(event: Any, inside: frozenset[int]) -> None:
        if event.typed[0] == _EventType.Allocation:
            fields = event.typed[1]
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size, inside))
        if event.typed[0] == _EventType.TorchOp and event.name.startswith(("memopt::_", "aten::")):
            inside = inside | {event.id}
        for child in event.children:
            visit(child, inside)

    for root in tree:
        visit(root, frozenset())
    return sorted(found, key=lambda allocation: allocation[0])


def _most_and_last(allocations: list[Allocation]) -> tuple[int, int]:
    begun: dict[int, int] = {}  # by address, the place in the list of what is allocated there
    scratch: set[int] = set()  # these places, where an operator freed what it had allocated
    for place, (_, address, size, inside) in enumerate(allocations):
        if size > 0:
            begun[address] = place
        elif address in begun:
            beginning = begun.pop(address)
            if inside & allocations[beginning][3]:
                scratch.add(beginning)
    live: dict[int, int] = {}
    most = 0
    for place, (_, address, size, _) in enumerate(allocations):
        if size < 0:
            live.pop(address, None)
        elif place not in scratch:
            live[address] = size
            most = max(most, sum(live.values()))
    return most, sum(live.values())
