"""Bytes, counted and not estimated: what autograd keeps for backward, and the peak of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from memopt.memory.allocator import LiveBytes
from memopt.memory.saved import SavedTensors


def saved_bytes(forward: Callable[[], object], parameters: Iterable[Tensor] = ()) -> int:
    """Bytes that `forward` leaves saved for backward, each storage whole and once, without those of
    `parameters`.
    """
    with SavedTensors(exclude=parameters, dropped=False) as saved:
        result = forward()
    held = saved.bytes
    del result
    return held


def held_bytes(fn: Callable[[], Tensor], device: torch.device) -> int:
    """Bytes of tensors that are alive when `fn()` has ended and were not before it, without those
    of its result: after a forward, all that is held for backward. Counted as in `peak_bytes`.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        result = fn()
        return torch.cuda.memory_allocated(device) - before - result.untyped_storage().nbytes()

    results: list[Tensor] = []
    changes = _cpu_allocations(lambda: results.append(fn()))
    return sum(changes) - results[0].untyped_storage().nbytes()


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

    current = peak = 0
    for change in _cpu_allocations(fn):
        current += change
        peak = max(peak, current)
    return peak


def most_bytes(fn: Callable[[], object], device: torch.device) -> int:
    """The same without what an operator takes and gives back while it runs, which on CUDA is not
    told apart.
    """
    if device.type == "cuda":
        return peak_bytes(fn, device)
    with LiveBytes() as live:
        fn()
    return live.most


def step_bytes(forward: Callable[[], Tensor], device: torch.device) -> tuple[int, int]:
    """Of a step whose `forward` gives the loss: bytes that are held when forward has ended, and the
    most at any time until backward has; above what was there before.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        loss = forward()
        held = torch.cuda.memory_allocated(device) - before
        loss.backward()
        return held, torch.cuda.max_memory_allocated(device) - before
    with LiveBytes() as live:
        loss = forward()
        live.mark()
        loss.backward()
    return live.marks[0].nbytes, live.most


def _cpu_allocations(fn: Callable[[], object]) -> list[int]:
    """The bytes that `fn()` takes from the CPU allocator and, negative, gives back, in order."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        fn()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    memory = (event for event in events if event.name() == "[memory]")
    return [event.nbytes() for event in sorted(memory, key=lambda event: event.start_ns())]
