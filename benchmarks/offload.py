"""Time and bytes of offloading, against PyTorch's and hooks of one's own, in one run.

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
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import memopt
from benchmarks import record
from benchmarks.cli import RESULTS, has_device
from benchmarks.clocks import StepClock, Thunk, finish
from benchmarks.harness import QUICK, Effort, alternate, spread
from benchmarks.offload_arithmetic import (
    COPIES_IN_FLIGHT,
    arithmetic,
    formula,
    link,
)
from benchmarks.offload_peak import peak_in_a_process, peak_on_accelerator
from benchmarks.offload_report import GOAL_PEAK_ERROR, GOAL_TIME, report, verdict
from benchmarks.offload_ways import (
    BASELINE,
    STACKS,
    Size,
    Stack,
    Transfers,
    Way,
    ways,
)

OP = "offload"
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
    memopt.offload.configure(copies_in_flight=COPIES_IN_FLIGHT)
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
    memopt.offload.stats(reset=True, wait=True)
    repeats = 3
    for _ in range(repeats):
        step()
    finish(device)
    stats = memopt.offload.stats(wait=True)
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
    if not has_device(OP, args.device):
        return 2
    deadline = time.monotonic() + 60 * args.minutes
    device = torch.device(args.device)
    sizes = CPU_SIZES if device.type == "cpu" else CUDA_SIZES
    effort = CPU_EFFORT if device.type == "cpu" else CUDA_EFFORT
    if args.quick:
        sizes, effort = QUICK_SIZES, QUICK
    effort = dataclasses.replace(effort, seed=args.seed)
    settings = {**dataclasses.asdict(effort), "copies_in_flight": COPIES_IN_FLIGHT}
    header = record.header(OP, GOALS, settings, argv, device)
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
        memopt.offload.empty_cache()
        with contextlib.suppress(RuntimeError):  # there is no accelerator
            torch.accelerator.empty_cache()


def _first_line(case: Mapping[str, Any]) -> str:
    return verdict(case) if "variants" in case else case["error"]


if __name__ == "__main__":
    sys.exit(main())
