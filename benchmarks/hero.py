"""The first figure of the README: one training step as it is, with one line, and within a budget.

The demo's GPT over bytes, trained three ways from the same weights on the same batches, which take
turns step by step: **eager**; **convert**, `memopt.convert(model)`; **plan**,
`memopt.plan(model, batch, budget).apply()`, where the budget leaves activations `SHARE` of what
they take in eager mode. Memory is the allocator's (memopt.memory.allocator), beyond weights and
optimizer states, in one step of forward and backward that is watched, which slows it; a step's time
is the median of all that were not. So the drawing has the course of memory from the one and its
length from the other.

`python -m benchmarks.hero [--quick] [--seed N] [--out FILE.json]` writes the JSON and the figure.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import memopt
from benchmarks import record
from benchmarks.cli import parse_ways
from memopt.demo.data import Batches, load_text
from memopt.demo.memory import MemoryProfile, profile_memory
from memopt.demo.model import GPT, ModelSize
from memopt.memory.sizes import MB
from memopt.show.figure import GREY, write_figure

OP = "hero"
SIZE = ModelSize(layers=8, width=128, heads=4, context=128)
BATCH, STEPS, QUICK_STEPS = 8, 150, 3
LEARNING_RATE = 1e-3
SHARE = 0.35
"""The budget as a share of the peak of eager's activations and temporary buffers."""

COLORS = {"eager": "#5f6b76", "convert": "#2a9d8f", "plan": "#3b7dd8"}
TITLES = {
    "eager": "PyTorch",
    "convert": "memopt.convert(model)",
    "plan": "memopt.plan(model, ..., budget)",
}


class Way:
    """A model trained in one way."""

    def __init__(self, name: str, initial: GPT, batch: tuple[Any, ...]) -> None:
        self.model = copy.deepcopy(initial)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.budget: int | None = None
        if name == "convert":
            memopt.convert(self.model)
        if name == "plan":
            everything = memopt.plan(self.model, batch, optimizer=self.optimizer)
            before = sum(p.nbytes for p in self.model.parameters()) * 3  # with AdamW's two states
            self.budget = int(before + SHARE * (everything.plain_peak - before))
            memopt.plan(self.model, batch, self.budget, optimizer=self.optimizer).apply()

    def step(self, batch: tuple[Any, ...]) -> None:
        start = time.perf_counter()
        loss = self.model(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    def profile(self, batch: tuple[Any, ...]) -> MemoryProfile:
        """The fastest of five steps, all with the same bytes."""
        profiles = []
        for _ in range(5):
            profiles.append(profile_memory(lambda: self.model(*batch), torch.device("cpu")))
            self.optimizer.zero_grad()
        return min(profiles, key=lambda profile: profile.ms[-1])


def measure(steps: int, seed: int) -> dict[str, Any]:
    """Trains the three ways, and returns the case of the JSON file."""
    batches = Batches(load_text(None), BATCH, SIZE.context, steps, seed)
    initial = GPT(SIZE, torch.Generator().manual_seed(seed))
    ways = {name: Way(name, initial, batches[0]) for name in TITLES}
    for step in range(steps):
        for way in ways.values():
            way.step(batches[step])
    eager = ways["eager"]
    variants = {}
    for name, way in ways.items():
        profile = way.profile(batches[0])
        ratios = [mine / other for mine, other in zip(way.seconds, eager.seconds, strict=True)]
        variants[name] = {
            "budget_bytes": way.budget,
            "saved_bytes": profile.saved,
            "peak_bytes": profile.peak,
            "seconds": statistics.median(way.seconds),
            "over_eager": statistics.median(ratios),
            "forward_ms": round(profile.forward_ms, 3),
            "ms": [round(value, 3) for value in profile.ms],
            "live": profile.live,
            "losses": way.losses,
        }
    return {"rounds": steps, "variants": variants}


def course(way: dict[str, Any]) -> tuple[list[float], list[float]]:
    """A way's memory in MB over time, where eager's step ends at 1."""
    times = [way["over_eager"] * ms / way["ms"][-1] for ms in way["ms"]]
    return times, [value / MB for value in way["live"]]


def draw(case: dict[str, Any], out: Path) -> None:
    """Three panels on one axis, and the loss as one line: where the ways differ it would fork."""
    variants = case["variants"]
    eager = variants["eager"]

    def panels(figure: Any) -> None:
        grid = figure.subplots(1, 4, width_ratios=(3, 3, 3, 2))
        for axes, (name, way) in zip(grid, variants.items(), strict=False):
            times, live = course(way)
            axes.fill_between(times, live, step="post", color=COLORS[name], alpha=0.35, lw=0)
            axes.step(times, live, where="post", color=COLORS[name], lw=1.2)
            if name != "eager":
                axes.step(*course(eager), where="post", color=GREY, lw=0.7)
            axes.set_title(TITLES[name], color=COLORS[name])
            axes.set_xlim(0, max(way["over_eager"] for way in variants.values()))
            axes.set_ylim(0, 1.25 * eager["peak_bytes"] / MB)
            peak = f"peak {way['peak_bytes'] / MB:.0f} MB"
            if name != "eager":
                peak += f", {way['peak_bytes'] / eager['peak_bytes']:.2f}x"
                peak += f"\nstep {way['over_eager']:.2f}x"
            axes.text(0.98, 0.98, peak, transform=axes.transAxes, ha="right", va="top")
            axes.set_xlabel("time, by eager's step")
        grid[0].set_ylabel("MB beyond weights and optimizer")
        steps = range(1, len(eager["losses"]) + 1)
        for name, way in variants.items():
            grid[3].plot(steps, way["losses"], color=COLORS[name], lw=0.8)
        grid[3].set_title("loss of all three", color="#333333")
        grid[3].set_xlabel("step")

    write_figure(out, (11, 3.6), panels)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_ways(OP, argv)
    steps = QUICK_STEPS if args.quick else STEPS
    settings = {"size": dataclasses.asdict(SIZE), "batch": BATCH, "steps": steps, "seed": args.seed}
    results = record.begin(args.out, OP, {}, settings, argv)
    case = measure(steps, args.seed)
    results.add("gpt", case)
    figure = args.out.with_suffix(".png")
    draw(case, figure)
    for name, way in case["variants"].items():
        print(f"{name:8} peak {way['peak_bytes'] / MB:6.1f} MB  step {way['over_eager']:.2f}x")
    print(f"\n{args.out}\n{figure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
