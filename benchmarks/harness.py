"""Measures the variants of one case against each other.

A case is one computation at one size; its variants are different ways to do it, the first being the
baseline. The variants take turns within every round (A B C, C A B, ...), so whatever else slows the
machine down for a while slows all of them down. What is reported is the median over the rounds of
the ratio within a round, and its quartiles.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.clocks import Clock, Thunk, paused_gc
from benchmarks.memory import peak_bytes, saved_bytes


@dataclass(frozen=True)
class Variant:
    """One way to do a case's computation."""

    name: str
    run: Thunk
    """The call that is timed; it takes and needs nothing, its result is dropped."""
    forward: Thunk | None = None
    """The part of `run` whose saved tensors are counted; None where no graph is recorded."""
    parameters: Sequence[torch.Tensor] = ()
    """Tensors that do not count as saved: the model keeps them alive anyway."""
    is_peer: bool = False
    """Another library's: where it cannot do a case, that is recorded and the case goes on."""
    extra_bytes: int = 0
    """Bytes that this variant has to read or write beyond the case's `ideal_bytes`."""


@dataclass(frozen=True)
class Case:
    """One computation at one size. The fields up to `threads` are its identity."""

    op: str
    direction: str
    """`forward`, `backward` or `forward+backward`."""
    rows: int
    cols: int
    dtype: torch.dtype
    approximate: str | None
    """GELU's form; None for an op without GELU."""
    device: str
    threads: int
    ideal_bytes: int = field(compare=False)
    """Bytes that have to be read and written at the least: the GB/s are of these."""
    build: Callable[[], Sequence[Variant]] = field(compare=False, repr=False)
    """Allocates the tensors and returns the variants, the baseline first."""

    @property
    def key(self) -> str:
        """The name in the JSON file, for example `gelu/forward/64x1024/float32/tanh/cpu/1`."""
        dtype = str(self.dtype).removeprefix("torch.")
        form = [self.approximate] if self.approximate else []
        shape = f"{self.rows}x{self.cols}"
        return "/".join(
            [self.op, self.direction, shape, dtype, *form, self.device, str(self.threads)]
        )


@dataclass(frozen=True)
class Effort:
    """How long to measure. The defaults are those of a full run."""

    rounds: int = 15
    """Rounds of a case, unless the time below is over earlier."""
    min_rounds: int = 5
    case_seconds: float = 1.5
    """Timed seconds of a case, all variants together, after which no further round is started."""
    sample_seconds: float = 0.008
    """Length of one sample, from which the number of calls in it follows."""
    seed: int = 0
    """The seed of the order within the rounds."""


CUDA = Effort(rounds=9, case_seconds=0.6, sample_seconds=0.004)
"""Events on a GPU leave little noise: quartiles of its ratios lie within 1 %."""
QUICK = Effort(rounds=5, min_rounds=3, case_seconds=0.4, sample_seconds=0.003)


def effort_of(args: argparse.Namespace, full: Effort, on_cuda: Effort | None = None) -> Effort:
    """The effort that a command's options name; without `on_cuda` a GPU gets the full one too."""
    effort = QUICK if args.quick else full
    if on_cuda is not None and not args.quick and args.device == "cuda":
        effort = on_cuda
    return dataclasses.replace(effort, seed=args.seed)


def round_orders(names: Sequence[str], rounds: int, seed: int) -> list[list[str]]:
    """The order of the variants in each round: shuffled, so that no variant always follows the same
    other one.
    """
    generator = random.Random(seed)
    return [generator.sample(list(names), len(names)) for _ in range(rounds)]


def alternate(
    runs: Mapping[str, Thunk], clock: Clock, effort: Effort
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds per call of every variant in every round, and how many calls one sample of it has.

    The calibration is the warm-up.
    """
    calls = {name: clock.calibrate(run, effort.sample_seconds) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    started = time.perf_counter()
    with paused_gc():
        for done, order in enumerate(round_orders(list(runs), effort.rounds, effort.seed)):
            if done >= effort.min_rounds and time.perf_counter() - started > effort.case_seconds:
                break
            for name in order:
                seconds[name].append(clock.sample(runs[name], calls[name]))
    return seconds, calls


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, to four digits."""
    if len(values) == 1:
        q1 = median = q3 = values[0]
    else:
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": _digits(median), "q1": _digits(q1), "q3": _digits(q3)}


def measure(case: Case, clock: Clock, effort: Effort, copy_bandwidth: float) -> dict[str, Any]:
    """The record of a case, as it stands in the JSON file (NOTES.md lists its fields).

    Saved and peak bytes are counted in calls of their own, so counting does not disturb the timing.
    Ratios are baseline time over the variant's time in the same round: above 1 the variant is
    faster.
    """
    started = time.perf_counter()
    device = torch.device(case.device)
    variants, failed = _runnable(case.build())
    seconds, calls = alternate({variant.name: variant.run for variant in variants}, clock, effort)
    baseline = seconds[variants[0].name]

    def describe(variant: Variant) -> dict[str, object]:
        times = seconds[variant.name]
        bandwidth = (case.ideal_bytes + variant.extra_bytes) / statistics.median(times)
        saved = (
            None if variant.forward is None else saved_bytes(variant.forward, variant.parameters)
        )
        return {
            "us": spread([1e6 * t for t in times]),
            "ratio": spread([b / t for b, t in zip(baseline, times, strict=True)]),
            "gb_per_s": _digits(bandwidth / 1e9),
            "fraction_of_copy": _digits(bandwidth / copy_bandwidth),
            "saved_bytes": saved,
            "peak_bytes": peak_bytes(variant.run, device),
            "calls_per_sample": calls[variant.name],
            "samples_us": [_digits(1e6 * t) for t in times],
        }

    return {
        "op": case.op,
        "direction": case.direction,
        "rows": case.rows,
        "cols": case.cols,
        "dtype": str(case.dtype).removeprefix("torch."),
        "approximate": case.approximate,
        "device": case.device,
        "threads": case.threads,
        "ideal_bytes": case.ideal_bytes,
        "baseline": variants[0].name,
        "rounds": len(baseline),
        "variants": {variant.name: describe(variant) for variant in variants},
        "failed": failed,
        "seconds": round(time.perf_counter() - started, 2),
    }


def compared(
    runs: Mapping[str, Thunk],
    clock: Clock,
    effort: Effort,
    base: str,
    over: str,
    about: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """The times of the ways to do one thing, in turns, as a case's record.

    Args:
        base: the way that the others are compared with.
        over: what a way's time over that one's in the same round is called.
        about: what else is known of each way, for its record.
    """
    seconds, _ = alternate(runs, clock, effort)
    variants = {}
    for name, times in seconds.items():
        ratios = [own / of_base for own, of_base in zip(times, seconds[base], strict=True)]
        variants[name] = {**about[name], "seconds": spread(times), over: spread(ratios)}
    return {"rounds": len(seconds[base]), "variants": variants}


def _runnable(variants: Sequence[Variant]) -> tuple[list[Variant], dict[str, str]]:
    """The variants without the peers that raise, and what those raised."""
    kept, failed = [], {}
    for variant in variants:
        try:
            variant.run()
        except Exception as error:
            if not variant.is_peer:
                raise
            failed[variant.name] = f"{type(error).__name__}: {error}"[:300]
        else:
            kept.append(variant)
    return kept, failed


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
