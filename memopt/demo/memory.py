"""Memory of one training step, measured.

On the CPU by each allocation and its end (memopt/memory/allocator.py): exact bytes, the same in
every run, without what a kernel allocates and frees inside one operator. On CUDA the figures are
the caching allocator's, after each operator, with scratch memory.

memopt.saved_bytes asks autograd what it saves. This asks what is alive, at any time, gradients and
the tensors of backward included.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memopt.memory.allocator import DeviceBytes, LiveBytes
from memopt.memory.uncompiled_mode import UncompiledMode


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes beyond what was there before the step: without weights, optimizer state and batch."""

    saved: int
    """Alive at the end of forward, less the loss: what is held for backward."""
    peak: int
    """The most at any time in forward and backward, gradients included."""
    forward_ms: float
    """When forward ended, on the clock of `ms`."""
    ms: list[float]
    live: list[int]
    """Bytes alive, and since when."""


def profile_memory(forward: Callable[[], Tensor], device: torch.device) -> MemoryProfile:
    """Measures one forward() and backward. The caller has cleared the gradients beforehand."""
    if device.type == "cuda":
        return _profile_cuda(forward, device)
    with LiveBytes() as live:
        loss = forward()
        live.mark()
        loss.backward()
    (end_of_forward,) = live.marks
    return MemoryProfile(
        saved=end_of_forward.nbytes - loss.untyped_storage().nbytes(),
        peak=live.most,
        forward_ms=end_of_forward.ns / 1e6,
        ms=[instant.ns / 1e6 for instant in live.timeline],
        live=[instant.nbytes for instant in live.timeline],
    )


def _profile_cuda(forward: Callable[[], Tensor], device: torch.device) -> MemoryProfile:
    with DeviceBytes(device) as found, CudaSampler(device, found) as sampler:
        loss = forward()
        saved = found.now - loss.untyped_storage().nbytes()
        forward_ms = sampler.elapsed_ms()
        loss.backward()
        sampler.sample()
    return MemoryProfile(saved, found.above, forward_ms, sampler.ms, sampler.live)


class CudaSampler(UncompiledMode):
    """Asks the allocator after each operator, once the GPU has run it: its clock follows kernels.

    The peak is the allocator's own. While a dispatch mode watches, memopt's ops write over nothing
    (csrc/autograd/ownership.h), so the peaks of fused modes are upper bounds.
    """

    def __init__(self, device: torch.device, found: DeviceBytes) -> None:
        super().__init__()
        self.ms = [0.0]
        self.live = [0]
        self._start = time.perf_counter()
        self._device = device
        self._found = found

    def elapsed_ms(self) -> float:
        return (time.perf_counter() - self._start) * 1e3

    def sample(self) -> None:
        torch.cuda.synchronize(self._device)
        self.ms.append(self.elapsed_ms())
        self.live.append(self._found.now)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.sample()
        return result
