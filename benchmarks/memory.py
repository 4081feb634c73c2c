"""Bytes, counted and not estimated: what autograd keeps for backward, and the peak of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tests.support.saved_bytes import SavedTensors


def saved_bytes(forward: Callable[[], object], parameters: Iterable[Tensor] = ()) -> int:
    """Bytes that `forward` leaves saved for backward, each storage whole and once, without those of
    `parameters`.
    """
    with SavedTensors(exclude=parameters) as saved:
        result = forward()
    del result
    return saved.bytes


def peak_bytes(fn: Callable[[], object], device: torch.device) -> int:
    """The most bytes of tensors alive at once during `fn()`, above what was alive before it.

    On the CPU it is summed from the allocator's own events, on CUDA it is the caching allocator's
    statistic (which rounds each block up to 512 bytes).
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        fn()
        return torch.cuda.max_memory_allocated(device) - before

    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        fn()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    current = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak
