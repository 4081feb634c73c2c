"""The most bytes that PyTorch's CPU allocator gives out, kernels' scratch among them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


def allocated_by(step: Callable[[], object]) -> int:
    """The most bytes at any time of a call, beyond those before it; of its second run, since the
    first one makes what stays (threads' memory, an optimizer's states).
    """
    step()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    assert found.profiler is not None
    assert found.profiler.kineto_results is not None
    events = sorted(_allocations(found.profiler.kineto_results.experimental_event_tree()))
    mine: set[int] = set()
    changes = []
    for _, address, nbytes in events:
        if nbytes > 0:
            mine.add(address)
        elif address not in mine:
            continue  # what was there before ends
        else:
            mine.discard(address)
        changes.append(nbytes)
    return max(accumulate(changes), default=0)


def _allocations(events: list[Any]) -> Iterator[tuple[int, int, int]]:
    for event in events:
        kind, fields = event.typed
        if kind == _EventType.Allocation:
            yield event.start_time_ns, fields.ptr, fields.alloc_size
        yield from _allocations(event.children)
