"""Memory of one training step, measured.

On the CPU a dispatch mode sees every tensor that an operator returns, forward and backward, and
follows its storage from there to the moment it is freed. So the figures are exact bytes and the
same in every run. Not seen: scratch memory that a kernel allocates and frees inside one operator,
and a random number generator's saved state. While a dispatch mode watches, fused ops write over
nothing (csrc/autograd/ownership.h), so on the CPU their peaks are upper bounds. On CUDA the figures
are the caching allocator's, with scratch memory.

memopt.saved_bytes asks autograd what it saves. This asks what is alive, at any time, gradients and
the tensors of backward included.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
    """Bytes alive after each operator, and at which time it returned."""


def profile_memory(forward: Callable[[], Tensor], device: torch.device) -> MemoryProfile:
    """Measures one forward() and backward. The caller has cleared the gradients beforehand."""
    sampler = CudaSampler(device) if device.type == "cuda" else StorageSampler()
    with sampler:
        loss = forward()
        saved = sampler.live_bytes() - loss.untyped_storage().nbytes()
        forward_ms = sampler.elapsed_ms()
        loss.backward()
        sampler.sample()
    return MemoryProfile(saved, sampler.peak_bytes(), forward_ms, sampler.ms, sampler.live)


class Sampler(TorchDispatchMode):
    """Notes the time and the bytes alive after each operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ms = [0.0]
        self.live = [0]
        self._start = time.perf_counter()

    def live_bytes(self) -> int:
        raise NotImplementedError

    def peak_bytes(self) -> int:
        return max(self.live)

    def elapsed_ms(self) -> float:
        return (time.perf_counter() - self._start) * 1e3

    def sample(self) -> None:
        self.ms.append(self.elapsed_ms())
        self.live.append(self.live_bytes())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.sample()
        return result


class StorageSampler(Sampler):
    """Follows storages: one that an operator returns is new, unless one was given it before."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes = 0
        # By address. An entry goes with its storage, before the address can be used again.
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def live_bytes(self) -> int:
        return self._bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._follow(leaf.untyped_storage(), counts=False)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._follow(leaf.untyped_storage(), counts=True)
        self.sample()
        return result

    def _follow(self, storage: torch.UntypedStorage, counts: bool) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if counts else 0

        def freed(_: weakref.ref[torch.UntypedStorage]) -> None:
            self._bytes -= size
            del self._known[key]

        self._bytes += size
        self._known[key] = weakref.ref(storage, freed)


class CudaSampler(Sampler):
    """Asks the allocator, and waits for the GPU before each sample: its clock follows kernels."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        super().__init__()
        self._device = device
        self._base = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)

    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._base

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._base

    def sample(self) -> None:
        torch.cuda.synchronize(self._device)
        super().sample()
