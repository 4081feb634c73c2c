"""Measurements of the machine for benchmarks/offload.py, and what follows from them: whether the
link hides the copies, and the peak by the formulas of that file.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import memopt
from benchmarks.clocks import StepClock
from benchmarks.offload_ways import CHECKPOINTED, Size, Stack, through

COPIES_IN_FLIGHT = 4


def link(device: torch.device, size: int, directory: Path) -> dict[str, float]:
    """Bytes a second, out and back, of one plain copy at a time: to pinned memory and back, on a
    CPU to a file past the page cache where the file system has that. Medians of 7.
    """
    if device.type == "cpu":
        return _file_link(max(size * COPIES_IN_FLIGHT, 1 << 24), directory)
    clock = StepClock(device)
    there = torch.empty(size, dtype=torch.uint8, device=device).zero_()
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True).zero_()
    copies = {
        "out": lambda: host.copy_(there, non_blocking=True),
        "back": lambda: there.copy_(host, non_blocking=True),
    }
    return {
        name: size / statistics.median(clock.sample(copy, 10) for _ in range(7))
        for name, copy in copies.items()
    }


def _file_link(size: int, directory: Path) -> dict[str, float]:
    size = size // mmap.PAGESIZE * mmap.PAGESIZE
    buffer = mmap.mmap(-1, size)  # at a page's beginning, as direct I/O wants it
    buffer.write(os.urandom(1 << 20) * (size >> 20))
    path = directory / "link.bin"
    flags = os.O_RDWR | os.O_CREAT
    try:
        file = os.open(path, flags | getattr(os, "O_DIRECT", 0))
    except OSError:
        file = os.open(path, flags)

    def whole(transfer: Callable[[memoryview, int], int]) -> None:
        done = 0
        with memoryview(buffer) as view:
            while done < size:
                done += transfer(view[done:], done)

    def write() -> None:
        whole(lambda view, at: os.pwrite(file, view, at))
        os.fdatasync(file)

    def read() -> None:
        whole(lambda view, at: os.preadv(file, [view], at))

    try:
        return {
            name: size / statistics.median(_seconds(copy) for _ in range(7))
            for name, copy in (("out", write), ("back", read))
        }
    finally:
        os.close(file)
        path.unlink()
        buffer.close()


def _seconds(fn: Callable[[], object]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def arithmetic(
    size: Size, stack: Stack, bandwidth: Mapping[str, float], device: torch.device
) -> dict[str, Any]:
    """The copies that the link can hide, from the times of this run."""
    clock = StepClock(device)
    with torch.no_grad():
        run = functools.partial(through, stack.blocks, stack.x)
        run()
        forward = statistics.median(clock.sample(run, 1) for _ in range(5)) / size.blocks
    saved = memopt.saved_bytes(stack.blocks[0], stack.x)
    operations = size.forward_operations / forward
    itemsize = getattr(torch, size.dtype).itemsize
    return {
        "block_forward_seconds": forward,
        "operations_per_second": operations,
        "link_bytes_per_second": dict(bandwidth),
        "left": (12 * size.width + size.sequence) * 2 / itemsize,
        "right": operations / bandwidth["out"],
        "hides_inputs": (12 * size.width + size.sequence) * 2 / itemsize
        >= operations / bandwidth["out"],
        "fraction_of_whole": min(1.0, math.floor(100 * forward * bandwidth["out"] / saved) / 100),
        "input_bytes": size.input_bytes,
        "block_saved_bytes": int(saved),
        "largest_saved_bytes": max(storage.nbytes for storage in saved.storages),
    }


def formula(stack: str, size: Size, found: Mapping[str, Any], one: int, fraction: float) -> int:
    """The peak that the module's formulas give; `one` is W, `fraction` 0 without offload."""
    others, c = size.blocks - 1, found["input_bytes"]
    in_flight = COPIES_IN_FLIGHT + 1
    if stack == CHECKPOINTED:
        return one + (min(in_flight, others) if fraction else others) * c
    saved, largest = found["block_saved_bytes"], found["largest_saved_bytes"]
    if not fraction:
        return one + others * saved
    away = round(fraction * saved)
    return one + others * (saved - away) - away + in_flight * largest
