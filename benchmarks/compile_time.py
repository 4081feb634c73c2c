"""How long memopt.compile takes to compile a model, beside torch.compile.

The five families of compile.py that have budgets, one layer each, on the CPU in float32. Each
compilation is in a process of its own with an empty cache: the first forward and backward, kernels
compiled, less the second. The time is the processor's, of all compilers together. The ways take
turns; `over_torch` is the time over that of torch.compile in the same round.

`python -m benchmarks.compile_time [--rounds N] [--filter TEXT] [--out FILE.json]` writes the JSON
and prints a table.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.cli import RESULTS
from benchmarks.clocks import processor_seconds
from benchmarks.summary import describe, table

OP = "compile_time"
GOAL = 1.5
MODELS = ("Llama", "BERT", "ViT", "T5", "GPT-2")
TORCH, MEMOPT = "torch.compile", "memopt.compile"


def compile_seconds(name: str, way: str) -> float:
    """Processor seconds that the first step of a family takes beyond the second, in a new process
    with an empty cache.
    """
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compilers are this process's own children
        }
        command = [sys.executable, "-m", f"benchmarks.{OP}", "--child", name, way]
        done = subprocess.run(
            command, check=True, env=environment, stdout=subprocess.PIPE, text=True
        )
    return float(done.stdout.splitlines()[-1])


def child(name: str, way: str) -> None:
    """Print the seconds."""
    import torch

    import memopt
    from benchmarks.compile import ONE_LAYER, in_float32

    model, inputs = in_float32(name, ONE_LAYER)
    compile: Any = {TORCH: torch.compile, MEMOPT: memopt.compile}[way]
    forward = compile(lambda: model(**inputs).loss)
    taken = []
    for _ in range(2):
        before = processor_seconds()
        forward().backward()
        taken.append(processor_seconds() - before)
    print(taken[0] - taken[1])


def measure(name: str, rounds: int) -> dict[str, Any]:
    """The record of a family, as it stands in the JSON file."""
    seconds: dict[str, list[float]] = {TORCH: [], MEMOPT: []}
    for k in range(rounds):
        for way in (TORCH, MEMOPT) if k % 2 == 0 else (MEMOPT, TORCH):
            seconds[way].append(compile_seconds(name, way))
    variants = {}
    for way, taken in seconds.items():
        ratios = [ours / theirs for ours, theirs in zip(taken, seconds[TORCH], strict=True)]
        variants[way] = {
            "processor_seconds": [round(each, 2) for each in taken],
            "over_torch": {
                "median": round(statistics.median(ratios), 3),
                "least": round(min(ratios), 3),
                "most": round(max(ratios), 3),
            },
        }
    return {"rounds": rounds, "variants": variants}


def report(run: Mapping[str, Any]) -> str:
    """The run as Markdown."""
    rows = []
    for name, case in run["cases"].items():
        for way, found in case["variants"].items():
            over, taken = found["over_torch"], statistics.median(found["processor_seconds"])
            ratio = f"{over['median']:.2f} ({over['least']:.2f} to {over['most']:.2f})"
            rows.append([name, way, f"{taken:.1f}", ratio])
    head = ["", "", "processor seconds", "over torch.compile's"]
    return "\n\n".join(["# Time to compile", describe(dict(run)), table(head, rows)])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{OP}")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--filter", default="", metavar="TEXT", help="families with it in the name")
    parser.add_argument("--out", type=Path, default=RESULTS / f"cpu_{OP}.json", help="JSON file")
    parser.add_argument("--child", nargs=2, metavar=("NAME", "WAY"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        child(*args.child)
        return 0
    results = record.begin(args.out, OP, {"largest": GOAL}, {"rounds": args.rounds}, argv)
    for name in (name for name in MODELS if args.filter in name):
        results.add(name, measure(name, args.rounds))
        print(f"{name} done", flush=True)
    print(f"\n{report(results.run)}\n\n{args.out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
