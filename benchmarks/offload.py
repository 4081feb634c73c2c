"""What offloading costs and frees, against what PyTorch and one's own hooks do, in one run.

A stack of GPT blocks does training steps without an optimizer, in each of these ways in turns:

- **checkpointed**: every block a region, whose input alone is saved. On a GPU without offload, with
  `memopt.checkpoint_wrapper(offload_to_cpu=True)`, with PyTorch's regions inside
  `torch.autograd.graph.save_on_cpu(pin_memory=True)`, and with PyTorch's `offload_wrapper` around
  each. On a CPU to disk, against Python hooks that write and read a file for each tensor.
- **whole**: no regions, so everything is saved: without offload, with `memopt.offload()` of all of
  it and of the fraction that the arithmetic gives, and the same peers.

**The arithmetic.** With F the operations a second of a block's forward and B the link's bytes a
second, both measured in the same run, a block's input of e bytes an element leaves while the block
computes if (12 h + s) 2 / e >= F / B, and of all that the block saves the link hides the fraction
B t / S, t the block's forward and S what it saves.

**The formulas of the peak**, with W the peak of the same step of a single block without offload, c
a block's input, L blocks and K copies in flight:

    checkpointed:  W + min(K + 1, L - 1) c                 without offload: W + (L - 1) c
    whole:         W + (1 - f) (L - 1) S - f S + (K + 1) b          without: W + (L - 1) S

f is the fraction offloaded, b the largest storage saved. K + 1: those that are leaving, and the one
that is back early. So many there are where the host is ahead of the device, which then finds out
late that they have left; else fewer.

Goals, on a GPU: where the arithmetic says that the link hides it all, memopt's step takes at most
0.5 % longer than without offload; and memopt's peak is within 5 % of the checkpointed formula.

`python -m benchmarks.offload --device cuda` (minutes) or without it (two minutes) writes the JSON
and prints its tables. Peaks are PyTorch's count of the device's memory; on a CPU the resident
memory of a process for each way.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import memopt
from benchmarks import record
from benchmarks.cli import RESULTS
from benchmarks.clocks import CpuClock, Thunk
from benchmarks.harness import QUICK, Effort, alternate, spread
from benchmarks.offload_peak import peak_in_a_process, peak_on_accelerator
from benchmarks.offload_report import GOAL_PEAK_ERROR, GOAL_TIME, report, verdict
from benchmarks.offload_ways import (
    BASELINE,
    CHECKPOINTED,
    STACKS,
    Size,
    Stack,
    Transfers,
    Way,
    through,
    ways,
)

OP = "offload"
COPIES_IN_FLIGHT = 4
GOALS = {"step over the baseline's, if hidden": GOAL_TIME, "error of the peak": GOAL_PEAK_ERROR}

# The most important first: a run in `make bench-gpu` may end before the last.
CUDA_SIZES = (
    Size(4096, 4096, 2, 8, "bfloat16"),
    Size(2048, 2048, 4, 12, "bfloat16"),
    Size(1024, 1024, 8, 16, "bfloat16"),
    Size(4096, 8192, 1, 8, "bfloat16"),
    Size(2048, 8192, 1, 12, "bfloat16"),
    Size(1024, 8192, 1, 16, "bfloat16"),
)
CPU_SIZES = (Size(256, 256, 4, 8, "float32"),)
QUICK_SIZES = (Size(64, 128, 4, 7, "float32"),)

CUDA_EFFORT = Effort(rounds=25, min_rounds=5, case_seconds=10.0, sample_seconds=0.2)
CPU_EFFORT = Effort(rounds=9, min_rounds=5, case_seconds=15.0, sample_seconds=0.2)


class StepClock(CpuClock):
    """Wall-clock time of steps, each sample from an idle device to an idle device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def sample(self, fn: Thunk, calls: int) -> float:
        finish(self.device)
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        finish(self.device)
        return (time.perf_counter() - start) / calls


def finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


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
    """What the link can hide, from the times of this run."""
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


def fraction_of(way: Way) -> float:
    """The share of the bytes that one of memopt's ways offloads."""
    if way.name == BASELINE:
        return 0.0
    return float(way.name.partition("fraction=")[2].rstrip(")") or 1)


def measure(
    stack_name: str,
    size: Size,
    device: torch.device,
    effort: Effort,
    directory: Path,
    threads: int,
) -> dict[str, Any]:
    """The record of one stack of one size, as it stands in the JSON file."""
    started = time.perf_counter()
    torch.set_num_threads(threads)
    memopt.configure_offload(copies_in_flight=COPIES_IN_FLIGHT)
    stack = Stack(size, device)
    parameters = list(stack.blocks.parameters())
    found = arithmetic(size, stack, link(device, size.input_bytes, directory), device)
    contenders = ways(stack_name, device, directory, found["fraction_of_whole"], parameters)
    steps = {way.name: stack.step_of(way) for way in contenders}
    expected = stack.results_of(steps[BASELINE])
    same, failed = {}, {}
    for way in contenders:
        try:
            steps[way.name]()
            results = stack.results_of(steps[way.name])
        except Exception as error:
            if not way.is_peer:
                raise
            failed[way.name] = f"{type(error).__name__}: {error}"[:300]
            del steps[way.name]
        else:
            same[way.name] = all(torch.equal(a, e) for a, e in zip(results, expected, strict=True))
    del expected, results
    seconds, calls = alternate(steps, StepClock(device), effort)

    def peak(way: Way, of: Size, step: Thunk) -> int | None:
        if device.type != "cpu":
            return peak_on_accelerator(step, device)
        share = found["fraction_of_whole"]
        return peak_in_a_process(of, stack_name, way.name, share, directory, threads)

    one_size = dataclasses.replace(size, blocks=1)
    one_step = Stack(one_size, device).step_of(contenders[0])
    one_step()
    found["one_block_peak_bytes"] = one = peak(contenders[0], one_size, one_step)
    variants = {}
    for way in contenders:
        if way.name in failed:
            continue
        times = seconds[way.name]
        peak_bytes = peak(way, size, steps[way.name])
        variants[way.name] = {
            "seconds": spread(times),
            "over_baseline": spread([t / b for t, b in zip(times, seconds[BASELINE], strict=True)]),
            "peak_bytes": peak_bytes,
            **traffic(way, steps[way.name], device),
            "same_bits": same[way.name],
            "calls_per_sample": calls[way.name],
            "samples_seconds": [float(f"{t:.5g}") for t in times],
        }
        if not way.is_peer and one is not None and peak_bytes is not None:
            predicted = formula(stack_name, size, found, one, fraction_of(way))
            variants[way.name] |= {
                "formula_bytes": predicted,
                "formula_error": round(predicted / peak_bytes - 1, 4),
            }
    return {
        "op": OP,
        "stack": stack_name,
        **dataclasses.asdict(size),
        "device": device.type,
        "threads": threads,
        "arithmetic": found,
        "baseline": BASELINE,
        "rounds": len(seconds[BASELINE]),
        "variants": variants,
        "failed": failed,
        "seconds": round(time.perf_counter() - started, 1),
    }


def traffic(way: Way, step: Thunk, device: torch.device) -> dict[str, Any]:
    """Bytes that one step copies, out and back; of memopt's ways how fast, and how long the device
    waited for it.
    """
    if way.files is not None:
        way.files.out = way.files.back = 0
        step()
        return {"bytes_out": way.files.out, "bytes_back": way.files.back}
    if way.is_peer:
        with Transfers() as seen:
            step()
        return {"bytes_out": seen.out, "bytes_back": seen.back}
    finish(device)
    memopt.offload_stats(reset=True, wait=True)
    repeats = 3
    for _ in range(repeats):
        step()
    finish(device)
    stats = memopt.offload_stats(wait=True)
    counted: dict[str, Any] = {
        "bytes_out": stats.bytes_out // repeats,
        "bytes_back": stats.bytes_back // repeats,
    }
    for place in stats.places:
        if place.out.copies:
            counted |= {
                "out_bytes_per_second": round(place.out.bytes_per_second),
                "back_bytes_per_second": round(place.back.bytes_per_second),
                "out_stall_seconds": place.out.stall_seconds / repeats,
                "back_stall_seconds": place.back.stall_seconds / repeats,
                "prefetch_hits": place.prefetch_hits // repeats,
                "prefetch_misses": place.prefetch_misses // repeats,
                "never_left": place.never_left // repeats,
                "most_in_flight": [place.out.most_in_flight, place.back.most_in_flight],
                "room_high_water": place.room_high_water,
                "advice": list(place.advice()),
            }
    return counted


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{OP}")
    add = parser.add_argument
    add("--device", default="cpu", choices=("cpu", "cuda"), help="default: cpu")
    add("--threads", type=int, default=1, help="that compute; default: 1")
    add("--seed", type=int, default=0, help="of the order of the ways; default: 0")
    add("--quick", action="store_true", help="tiny, few rounds: a check, not a result")
    add("--resume", action="store_true", help="keep the cases that the file has")
    add("--minutes", type=float, default=math.inf, help="start no case after; default: no limit")
    add("--directory", type=Path, default=Path.cwd(), help="on a CPU: on which disk; default: here")
    add("--out", type=Path, help=f"JSON file; default: benchmarks/results/DEVICE_{OP}.json")
    args = parser.parse_args(argv)
    args.out = args.out or RESULTS / f"{args.device}_{OP}.json"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 if a case failed, 2 if there is no such device."""
    args = parse(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        message = f"benchmarks.{OP}: PyTorch {torch.__version__} sees no CUDA device here"
        print(message, file=sys.stderr)
        return 2
    deadline = time.monotonic() + 60 * args.minutes
    device = torch.device(args.device)
    sizes = CPU_SIZES if device.type == "cpu" else CUDA_SIZES
    effort = CPU_EFFORT if device.type == "cpu" else CUDA_EFFORT
    if args.quick:
        sizes, effort = QUICK_SIZES, QUICK
    effort = dataclasses.replace(effort, seed=args.seed)
    settings = {**dataclasses.asdict(effort), "copies_in_flight": COPIES_IN_FLIGHT}
    command = ["python", "-m", f"benchmarks.{OP}", *(sys.argv[1:] if argv is None else argv)]
    header = record.header(OP, GOALS, settings, command, device, {})
    if header["load_average"] > 0.5:
        print(f"{OP}: this machine is busy (load {header['load_average']}): expect noise")
    results = record.Record(args.out, header, args.resume)
    with tempfile.TemporaryDirectory(prefix=".offload-", dir=args.directory) as directory:
        for size in sizes:
            for stack in STACKS:
                key = f"{OP}/{stack}/{size.key}/{args.device}/{args.threads}"
                if key in results.cases:
                    continue
                if time.monotonic() > deadline:
                    print(f"{OP}: out of time, the rest is left for --resume", flush=True)
                    break
                results.add(key, _case(stack, size, device, effort, Path(directory), args.threads))
                print(f"{key}: {_first_line(results.cases[key])}", flush=True)
    print(f"\n{report({**results.header, 'cases': results.cases})}\n{args.out}", flush=True)
    return 1 if any("error" in case for case in results.cases.values()) else 0


def _case(*asked: Any) -> dict[str, Any]:
    """The case's record, or why there is none: a failure does not end the run."""
    try:
        return measure(*asked)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        memopt.empty_offload_cache()
        with contextlib.suppress(RuntimeError):  # there is no accelerator
            torch.accelerator.empty_cache()


def _first_line(case: Mapping[str, Any]) -> str:
    return verdict(case) if "variants" in case else case["error"]


if __name__ == "__main__":
    sys.exit(main())
