"""Bytes, counted and not estimated: what autograd keeps for backward, and the peak of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from memopt.memory.allocator import DeviceBytes, LiveBytes, most_above
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
    of its result: after a forward, all that is held for backward.
    """
    results: list[Tensor] = []
    if device.type == "cuda":
        with DeviceBytes(device) as found:
            results.append(fn())
            left = found.now
    else:
        with LiveBytes() as live:
            results.append(fn())
        left = live.left
    return left - results[0].untyped_storage().nbytes()


def peak_bytes(fn: Callable[[], object], device: torch.device) -> int:
    """The most bytes of tensors alive at once during `fn()`, above what was alive before it, with
    what an operator takes and gives back while it runs. CUDA's allocator rounds each block up to
    512 bytes.
    """
    if device.type == "cuda":
        return most_above(device, fn)
    with LiveBytes() as live:
        fn()
    return live.most_with_scratch


def step_bytes(
    forward: Callable[[], Tensor], device: torch.device, scratch: bool = False
) -> tuple[int, int]:
    """Bytes of a step whose `forward` gives the loss: those held when forward has ended, and the
    most at any time until backward has; above what was there before. scratch: on the CPU with what
    operators allocate and free inside themselves, as it is on a GPU.
    """
    if device.type == "cuda":
        with DeviceBytes(device) as found:
            loss = forward()
            held = found.now
            loss.backward()
        return held, found.above
    with LiveBytes() as live:
        loss = forward()
        live.mark()
        loss.backward()
    return live.marks[0].nbytes, live.most_with_scratch if scratch else live.most
