"""Whole models in every way that people train them: bytes held, peak, and time of a step.

Models of transformers with a real vocabulary; a step is forward, loss and backward. On the CPU in
float32, on a GPU larger and in bfloat16. Ways: **eager**; each block under `torch.utils.checkpoint`
(and FairScale's wrapper, where it is installed); **memopt**'s recipes, regions, both, a plan for
half of eager's peak, and on a GPU regions whose inputs wait in the host's memory; `torch.compile`,
also at `activation_memory_budget`s of 0.7, 0.5, 0.3 and 0, and `memopt.compile`, also with the
peak of each of these as its budget. The compiled ways, which take the longest, are left out with
dropout and but for two models (compile.py has them for seven).

Bytes are the allocator's: what is held when forward ends, and the most at any time, beyond weights.
`row_bytes` is what one more row of the batch adds to the peak, and `rows_fit` how many rows have
the peak of eager's batch: the largest batch that fits where eager's just does; `tokens_fit` is the
same of the sequence's length. Times are taken in turns as in harness.py; `over_eager` is of the
same round.

`python -m benchmarks.models [--device cuda] [--quick] [--seed N] [--minutes N] [--out FILE.json]`
writes the JSON, the figure of peaks against times beside it, and prints the table.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks import record
from benchmarks.cli import has_device, in_time, parse_ways
from benchmarks.clocks import StepClock
from benchmarks.convert_models.sizes import SEQUENCES, Sizes
from benchmarks.harness import Effort, compared, effort_of
from benchmarks.model_ways import DROPOUT, EAGER, TIMES, Way, maker, ways_of
from benchmarks.summary import describe, quartiles, table

OP = "models"
FULL = Effort(rounds=15, min_rounds=5, case_seconds=20.0, sample_seconds=0.05)
CUDA_EFFORT = Effort(rounds=15, min_rounds=5, case_seconds=8.0, sample_seconds=0.15)
SIZES = Sizes(n=4, h=256, heads=8, kv_heads=4, m=1024, words=8192, tokens=256)
CUDA_SIZES = Sizes(n=6, h=2048, heads=16, kv_heads=8, m=8192, words=32768, tokens=512)
SMALLEST = Sizes(n=2, h=32, heads=4, kv_heads=2, m=64, words=99, tokens=16)
FAMILIES = ("Llama", "GPT-2", "BERT", "T5", "ViT")
COMPILED = ("Llama", "GPT-2")
"""Each compiled way takes half a minute."""


def case_of(
    ways: Mapping[str, Way], sizes: Sizes, device: torch.device, effort: Effort
) -> dict[str, Any]:
    """The record of a case, as it stands in the JSON file."""
    runs = {name: way.run for name, way in ways.items()}
    rows = SEQUENCES * TIMES[device.type]
    eager = ways[EAGER]
    about = {
        name: {
            "held_bytes": way.held,
            "peak_bytes": way.peak,
            "row_bytes": None if way.row is None else round(way.row),
            "rows_fit": fits(rows, eager.peak - way.peak, way.row),
            "token_bytes": None if way.token is None else round(way.token),
            "tokens_fit": fits(sizes.tokens, eager.peak - way.peak, way.token),
        }
        for name, way in ways.items()
    }
    return {**compared(runs, StepClock(device), effort, EAGER, "over_eager", about), "rows": rows}


def fits(taken: int, room: int, each: float | None) -> int | None:
    """How many of `each` bytes fit where `taken` of them leave `room`; None if not known."""
    return taken + int(room / each) if each is not None and each > 0 else None


def tables(run: Mapping[str, Any]) -> str:
    """A table for each model."""
    parts = []
    for name, case in run["cases"].items():
        eager = case["variants"][EAGER]
        rows = []
        for way, found in case["variants"].items():
            over = found["over_eager"]
            bytes_ = [
                f"{found[key] / 1e6:.1f} MB ({found[key] / eager[key]:.2f}x)"
                for key in ("held_bytes", "peak_bytes")
            ]
            time = quartiles(over)
            fits = [str(found[key] or "") for key in ("rows_fit", "tokens_fit")]
            rows.append([way, *bytes_, time, *fits])
        head = [name, "held", "peak", "time over eager", f"rows (eager {case['rows']})", "tokens"]
        parts.append(table(head, rows))
    return "\n\n".join(parts)


def report(run: Mapping[str, Any]) -> str:
    """The run as Markdown."""
    return "\n\n".join(["# Whole models", describe(dict(run)), tables(run)])


def plain_cases(cases: Mapping[str, Any]) -> dict[str, Any]:
    """The cases without dropout, which have all ways."""
    return {name: case for name, case in cases.items() if "dropout" not in name}


def draw(cases: Mapping[str, Any], out: Path) -> None:
    """A panel for each model: peak over eager's against time over eager's. A compiler's budgets are
    one line.
    """
    from benchmarks import plot  # only here: measuring needs no matplotlib

    figure, grid = plot.plt.subplots(
        1, len(cases), figsize=(3 * len(cases), 3.4), layout="constrained", squeeze=False
    )
    for axes, (name, case) in zip(grid.flat, cases.items(), strict=True):
        eager = case["variants"][EAGER]["peak_bytes"]
        series: dict[str, list[tuple[float, Any]]] = {}
        for way, found in case["variants"].items():
            kind = re.sub(r"(.*compile), .*", r"\1", way)
            series.setdefault(kind, []).append((found["peak_bytes"] / eager, found["over_eager"]))
        for number, (kind, points) in enumerate(series.items()):
            mark = "o" if "memopt" in kind or "convert" in kind else "s"
            line = "-" if len(points) > 1 else ""
            label = f"{kind} and its budgets" if line else kind
            style = {"fmt": mark + line, "lw": 1, "ms": 5, "color": f"C{number}", "label": label}
            plot.with_quartiles(axes, points, **style)
        axes.set_title(name)
        axes.set_xlabel("peak over eager's")
    grid[0][0].set_ylabel("time over eager's")
    figure.legend(
        *grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncol=4, fontsize=8
    )
    figure.savefig(out, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_ways(OP, argv, devices=("cpu", "cuda"))
    if not has_device(OP, args.device):
        return 2
    device = torch.device(args.device)
    on_cuda = device.type == "cuda"
    effort = effort_of(args, FULL, CUDA_EFFORT)
    sizes = SMALLEST if args.quick else CUDA_SIZES if on_cuda else SIZES
    families = FAMILIES[:1] if args.quick else FAMILIES
    settings = {**dataclasses.asdict(effort), "sizes": dataclasses.asdict(sizes)}
    results = record.begin(args.out, OP, {}, settings, argv, device)
    if find_spec("transformers") is None:
        print("models: transformers is not installed", file=sys.stderr)
        return 2
    dropout = {f"{name}, dropout": (name, 0.1) for name in DROPOUT}
    cases = {name: (name, 0.0) for name in families} | ({} if args.quick else dropout)
    for case, (name, probability) in in_time(OP, args, cases):
        make = maker(name, sizes, probability, device)
        compiles = probability == 0.0 and name in COMPILED
        ways = ways_of(make, compiles, hides=on_cuda)
        results.add(case, case_of(ways, sizes, device, effort))
        del ways
        print(f"{tables({'cases': {case: results.cases[case]}})}\n", flush=True)
        if on_cuda:
            torch.cuda.empty_cache()
    figure = args.out.with_suffix(".png")
    draw(plain_cases(results.cases), figure)
    run = results.run
    print(f"\n{report(run)}\n\n{args.out}\n{figure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
