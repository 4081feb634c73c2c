"""The simulated accelerator in Python: the device module `torch.sim`, and what tests set and read.

`load()` registers it, for the whole process and for good: see README.md.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from functools import cache
from typing import NamedTuple

import torch

from . import build, device_module


class Kind(IntEnum):
    """Of a task in a stream's queue, in the order of backend/streams.h."""

    KERNEL = 0
    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 3
    EVENT = 4
    POISON = 5


class Fault(IntEnum):
    """What broken code would do, in the order of backend/control.h."""

    NONE = 0
    WAITS_ARE_IGNORED = 1
    MOMENTS_ARE_REACHED = 2
    STREAM_IS_REMEMBERED = 3


class MemoryCounts(NamedTuple):
    allocated: int  # bytes now
    peak: int  # bytes at most, since reset_peak()
    reservations: int  # allocations that no freed block could serve: what cudaMalloc is on CUDA
    recorded: int  # calls of record_stream


class PinnedCounts(NamedTuple):
    allocated: int  # bytes now
    reservations: int  # allocations that no freed block could serve: what cudaHostAlloc is on CUDA


class Ran(NamedTuple):
    """A task, in the order in which the tasks of all streams began."""

    device: int
    stream: int
    kind: Kind
    name: str


@cache
def load() -> ctypes.CDLL:
    """Compiles the backend if need be and registers it as the device type "sim", with 2 devices."""
    faulthandler.enable()  # the host's touch of device memory is a segmentation fault
    library = ctypes.CDLL(str(build.library()))
    library.sim_trace_lines.restype = ctypes.c_char_p
    library.sim_synchronised_calls.restype = ctypes.c_char_p
    device_module.library = library
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", device_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    import memopt  # noqa: F401 - its private operators are covered as well

    library.sim_cover_operators()
    atexit.register(_finish)
    return library


def _finish() -> None:
    """No task runs while the process takes itself apart."""
    reset()
    for device in range(torch.accelerator.device_count()):
        with suppress(RuntimeError):  # of a task that no test heard of
            torch.accelerator.synchronize(device)


def _place(stream: torch.Stream | None) -> tuple[int, ctypes.c_int64]:
    stream = stream or torch.accelerator.current_stream()
    return stream.device_index, ctypes.c_int64(stream.stream_id)


@contextmanager
def paused(stream: torch.Stream | None = None) -> Iterator[None]:
    """Within it the stream begins no task. The host must not wait for it there."""
    load().sim_pause(*_place(stream), True)
    try:
        yield
    finally:
        load().sim_pause(*_place(stream), False)


def pause(stream: torch.Stream | None = None) -> None:
    """Until resume(stream) the stream begins no task."""
    load().sim_pause(*_place(stream), True)


def resume(stream: torch.Stream | None = None) -> None:
    load().sim_pause(*_place(stream), False)


def delay(kind: Kind, seconds: float, stream: torch.Stream | None = None) -> None:
    """Before each task of the kind: of the stream; without one of all streams, later ones too."""
    if stream is None:
        load().sim_delay_all(int(kind), ctypes.c_double(seconds))
    else:
        load().sim_delay(*_place(stream), int(kind), ctypes.c_double(seconds))


def random_delays(most_seconds: float, seed: int = 0) -> None:
    """Before each task of every stream, as long as a generator of the stream's says."""
    load().sim_random_delays(ctypes.c_uint64(seed), ctypes.c_double(most_seconds))


def reset() -> None:
    """No delays, faults, paused streams; pinning works, and not strictly; all memory is there."""
    load().sim_resume_all()
    plant(Fault.NONE)
    for kind in Kind:
        delay(kind, 0)
    random_delays(0)
    host_patience(60)
    pinning(works=True, strict=False)
    for device in range(torch.accelerator.device_count()):
        capacity(1 << 36, device)


def plant(fault: Fault) -> None:
    """From now on PyTorch's stream interface does this to whoever uses it."""
    load().sim_set_fault(int(fault))


def host_patience(seconds: float) -> None:
    """How long the host waits for a stream before it raises."""
    load().sim_patience(ctypes.c_double(seconds))


def pinning(*, works: bool = True, strict: bool = False) -> None:
    """works=False: allocating pinned memory raises. strict: a freed buffer is poisoned and reused
    at once; otherwise when the copies that it was given to are done, as with PyTorch's allocator.
    """
    load().sim_pinning_works(works)
    load().sim_pinned_strict(strict)


def capacity(size: int, device: int = 0) -> None:
    """Allocations beyond so many bytes in use raise torch.OutOfMemoryError."""
    load().sim_capacity(device, ctypes.c_int64(size))


def memory(device: int = 0) -> MemoryCounts:
    _let_go_of_graphs(device)
    counts = (ctypes.c_int64 * 4)()
    load().sim_memory_counts(device, counts)
    return MemoryCounts(*counts)


def _let_go_of_graphs(device: int) -> None:
    """Autograd's thread of the device drops a graph, and the gradients that were its results, a
    little after the caller of backward goes on. It takes up the next backward when that is done:
    this one has no bytes and no task.
    """
    with torch.enable_grad():
        empty = torch.empty(0, device=f"sim:{device}", requires_grad=True)
        torch.autograd.grad(empty.view(0), empty, empty.detach())


def reset_peak() -> None:
    load().sim_reset_peak(0)


def pinned() -> PinnedCounts:
    counts = (ctypes.c_int64 * 2)()
    load().sim_pinned_counts(counts)
    return PinnedCounts(*counts)


@contextmanager
def trace() -> Iterator[list[Ran]]:
    """Fills the list, at the end of the context, with the tasks that began in it."""
    ran: list[Ran] = []
    load().sim_trace(True)
    try:
        yield ran
    finally:
        load().sim_trace(False)
        for line in load().sim_trace_lines().decode().splitlines():
            device, stream, kind, name = line.split(maxsplit=3)
            ran.append(Ran(int(device), int(stream), Kind(int(kind)), name))


def synchronised_calls() -> dict[str, int]:
    """Of each operator: how often the host waited for it, since its geometry depends on data."""
    lines = load().sim_synchronised_calls().decode().splitlines()
    return {name: int(calls) for name, calls in (line.rsplit(maxsplit=1) for line in lines)}
