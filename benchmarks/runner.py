"""The loop over a benchmark's cases: what `python -m benchmarks.ops OP` does."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import cli, clocks, peers, record
from benchmarks.harness import CUDA, Case, Effort, Variant, effort_of, measure

MakeCases = Callable[[argparse.Namespace], Iterable[Case]]


def all_cases(
    op: str,
    build: Callable[..., Sequence[Variant]],
    ideal_bytes: Callable[[str, int, int, torch.dtype], int],
    args: argparse.Namespace,
    form: str | None = None,
) -> Iterator[Case]:
    """A case for every combination of the options; `form` is GELU's, if the op has one."""
    for direction, dtype, (rows, cols), threads in itertools.product(
        args.direction, args.dtype, args.shapes, args.threads
    ):
        size = (direction, rows, cols, dtype)
        yield Case(
            op,
            *size,
            form,
            args.device,
            threads,
            ideal_bytes(*size),
            functools.partial(build, *size, args.device, args.peers),
        )


def main(
    op: str, make_cases: MakeCases, goals: Mapping[str, float], argv: Sequence[str] | None = None
) -> int:
    """Measures the cases of `op`; returns 0, 1 if one failed, 2 if there is no such device.

    `goals` gives the ratio to ATen that is aimed at on the CPU, by direction.
    """
    args = cli.parse(op, argv)
    if not cli.has_device(op, args.device):
        return 2
    deadline = time.monotonic() + 60 * args.minutes
    device = torch.device(args.device)
    clock = clocks.make_clock(device)
    effort = effort_of(args, Effort(), CUDA)
    keeps_memory = device.type == "cpu" and not args.fresh_pages and clocks.keep_freed_memory()
    copy_bandwidths = _copy_bandwidths(clock, args.threads)
    header = record.header(
        op,
        goals if device.type == "cpu" else {},
        {**dataclasses.asdict(effort), "keeps_freed_memory": keeps_memory},
        argv,
        device,
        copy_bandwidths,
    )
    if device.type == "cpu" and header["load_average"] > 0.5:
        print(
            f"{op}: this machine is busy (load {header['load_average']}): expect noise", flush=True
        )
    results = record.Record(args.out, header, args.resume)
    if results.stale:
        print(f"{args.out}: has other {', '.join(results.stale)}: started afresh", flush=True)
    if absent := peers.missing(args.peers):
        print(f"{op}: not installed, left out: {', '.join(absent)}", flush=True)
    cases = [case for case in make_cases(args) if args.filter in case.key]
    todo = [case for case in cases if case.key not in results.cases]
    print(f"{op}: {len(todo)} cases, {len(cases) - len(todo)} more in {args.out}", flush=True)
    results.save()
    return _measure_all(op, todo, results, clock, effort, copy_bandwidths, deadline)


def _measure_all(
    op: str,
    cases: Sequence[Case],
    results: record.Record,
    clock: clocks.Clock,
    effort: Effort,
    copy_bandwidths: Mapping[int, float],
    deadline: float,
) -> int:
    started = time.monotonic()
    failures = 0
    for index, case in enumerate(cases):
        if time.monotonic() > deadline:
            print(f"{op}: out of time, {len(cases) - index} cases left for --resume", flush=True)
            break
        torch.set_num_threads(case.threads)
        found = _measure(case, clock, effort, copy_bandwidths[case.threads])
        failures += "error" in found
        results.add(case.key, found)
        left = (time.monotonic() - started) / (index + 1) * (len(cases) - index - 1)
        progress = f"[{index + 1}/{len(cases)}, {left:.0f} s left]"
        print(f"{progress} {case.key}: {line(found, results.header['goals'])}", flush=True)
    return 1 if failures else 0


def _measure(
    case: Case, clock: clocks.Clock, effort: Effort, copy_bandwidth: float
) -> dict[str, Any]:
    """The case's record, or why there is none: a failure does not end the run."""
    needed = 12 * case.rows * case.cols * case.dtype.itemsize  # all variants' tensors, generously
    available = _available_bytes(case.device)
    if needed > available:
        return {"skipped": f"needs about {needed >> 20} MiB, {available >> 20} MiB are free"}
    try:
        return measure(case, clock, effort, copy_bandwidth)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def line(case: Mapping[str, Any], goals: Mapping[str, float]) -> str:
    """A case in one line, with the goal beside what was reached."""
    if "variants" not in case:
        return case.get("error") or f"skipped, {case['skipped']}"
    words = []
    for name, variant in case["variants"].items():
        words.append(f"{name} {variant['us']['median']:.4g} us")
        if name != case["baseline"]:
            ratio = variant["ratio"]
            words[-1] += f" = {ratio['median']:.2f}x ({ratio['q1']:.2f}-{ratio['q3']:.2f})"
        if name == "memopt":
            words[-1] += f", {100 * variant['fraction_of_copy']:.0f} % of copy"
            if case["direction"] in goals:
                words[-1] += f", goal {goals[case['direction']]:.1f}x"
    return "; ".join(words + [f"{name} failed" for name in case["failed"]])


def _copy_bandwidths(clock: clocks.Clock, threads: Iterable[int]) -> dict[int, float]:
    bandwidths = {}
    for number in threads:
        torch.set_num_threads(number)
        bandwidths[number] = clock.copy_bandwidth()
    return bandwidths


def _available_bytes(device: str) -> int:
    if device == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(text.split(":", 1) for text in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux: nothing is known, nothing is skipped
        return sys.maxsize
