"""Parts of blocks beside whole blocks, at equal budgets: what a plan's finer choices give.

GPT-2 and Llama of transformers, 12 layers each, in float32 on the CPU; a step is forward, loss and
backward. At shares of the plain step's peak three plans stand beside each other: **whole blocks**,
which keeps or checkpoints blocks as `torch.utils.checkpoint` would; **parts**, which may make parts
of blocks regions too (its attention, its MLP); and **plan**, all that memopt chooses from, with
recipes and regions of several blocks. The first two have no recipes, which for these models need
little time for half of the bytes and leave nothing to compare.

Choices follow from measured times of blocks. `predicted` is the time of a plan over the plain
step's by these, `over_plain` that of real steps in turns, as in harness.py. Peaks are predicted.

`python -m benchmarks.plan_parts [--quick] [--seed N] [--out FILE.json]` writes the JSON and prints
the table.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn

import memopt
from benchmarks import clocks, record
from benchmarks.cli import parse_ways
from benchmarks.convert_models.sizes import Sizes
from benchmarks.harness import Effort, compared, effort_of
from benchmarks.model_ways import maker
from benchmarks.summary import describe, quartiles, table
from memopt._plan.choices import CHOICES, WITH_PARTS
from memopt._plan.plan import Plan
from memopt._plan.solver import BelowFloor, solve
from memopt._plan.terms import problem
from memopt.applied import assign
from memopt.assignment import Assignment, Choice

OP = "plan_parts"
FULL = Effort(rounds=25, min_rounds=7, case_seconds=60.0, sample_seconds=0.05)
PLAIN, WHOLE, PARTS, PLAN = "plain", "whole blocks", "parts", "plan"
SHARES = (0.75, 0.6, 0.5)
"""Budgets as shares of the plain step's peak."""
SIZES = {
    "GPT-2": Sizes(n=12, h=256, heads=8, kv_heads=8, m=1024, words=512, tokens=256),
    "Llama": Sizes(n=12, h=256, heads=8, kv_heads=4, m=688, words=512, tokens=256),
}
SMALLEST = Sizes(n=3, h=32, heads=4, kv_heads=2, m=64, words=99, tokens=32)
WITHOUT_RECIPES = {
    WHOLE: tuple(choice for choice in CHOICES if not choice.recipes),
    PARTS: tuple(choice for choice in (*CHOICES, *WITH_PARTS) if not choice.recipes),
}


class Chosen(NamedTuple):
    assignment: Assignment
    predicted: float
    """The predicted time over the plain step's."""
    peak: int


def chosen_of(rich: Plan, choices: Sequence[Choice], budget: int) -> Chosen | None:
    """The best plan by the arithmetic, of these choices alone; None where none fits."""
    try:
        found = solve(problem(rich.profile, rich.terms, choices, with_recipes=False), budget)
    except BelowFloor:
        return None
    profile = rich.profile
    numbers = zip(profile.paths, found.choices[1:-1], strict=True)
    mine = {path: profile.allowed(path, choices[number]) for path, number in numbers}
    return Chosen(Assignment(mine), found.seconds / rich.plain_seconds, found.peak)


def chosen(rich: Plan) -> Iterator[tuple[str, Chosen]]:
    """Each way's name and plan."""
    for share in SHARES:
        budget = int(share * rich.plain_peak)
        for name, choices in WITHOUT_RECIPES.items():
            found = chosen_of(rich, choices, budget)
            if found is not None:
                yield f"{name} at {share:.0%}", found
        try:
            plan = rich.within(budget)
        except memopt.BudgetTooSmall:
            continue
        yield f"{PLAN} at {share:.0%}", Chosen(plan.assignment, 1 + plan.added, plan.peak)


def step(model: nn.Module, batch: Mapping[str, Tensor]) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()

    return run


def measure(family: str, sizes: Sizes, effort: Effort) -> dict[str, Any]:
    """The record of a case, as it stands in the JSON file."""
    make = maker(family, sizes, 0.0, torch.device("cpu"), times=2)
    torch.manual_seed(0)
    model, batch = make()
    rich = memopt.plan(model, batch, 1 << 50, optimizer=None, steps=7)
    runs = {PLAIN: step(model, batch)}
    about: dict[str, dict[str, Any]] = {PLAIN: {"peak_bytes": rich.plain_peak, "predicted": 1.0}}
    for name, found in chosen(rich):
        torch.manual_seed(0)
        mine, inputs = make()
        assign(mine, found.assignment)
        runs[name] = step(mine, inputs)
        about[name] = {"peak_bytes": found.peak, "predicted": round(found.predicted, 4)}
    case = compared(runs, clocks.StepClock(torch.device("cpu")), effort, PLAIN, "over_plain", about)
    return {**case, "gone": gone(case["variants"])}


def gone(variants: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """The part of the time that whole blocks add and parts do not, by share of the peak: predicted,
    and of real steps' medians.
    """
    found = {}
    for share in SHARES:
        pair = [variants.get(f"{name} at {share:.0%}") for name in (WHOLE, PARTS)]
        if None in pair:
            continue
        ways = {
            "predicted": [way["predicted"] for way in pair],
            "measured": [way["over_plain"]["median"] for way in pair],
        }
        found[f"{share:.0%}"] = {
            kind: round(1 - (parts - 1) / (whole - 1), 3) if whole > 1 else None
            for kind, (whole, parts) in ways.items()
        }
    return found


def report(run: Mapping[str, Any]) -> str:
    """The run as Markdown."""
    rows = []
    for name, case in run["cases"].items():
        plain = case["variants"][PLAIN]["peak_bytes"]
        for label, found in case["variants"].items():
            over = found["over_plain"]
            rows.append(
                [
                    name,
                    label,
                    f"{found['peak_bytes'] / plain:.2f}",
                    quartiles(over, 3),
                    f"{found['predicted']:.3f}",
                ]
            )
    head = ["", "", "peak, of plain's", "time over plain's", "predicted"]
    return "\n\n".join(["# Parts of blocks", describe(dict(run)), table(head, rows)])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_ways(OP, argv)
    args.device = "cpu"
    effort = effort_of(args, FULL)
    clocks.keep_freed_memory()
    torch.set_num_threads(1)
    settings = {
        **dataclasses.asdict(effort),
        "sizes": {name: dataclasses.asdict(sizes) for name, sizes in SIZES.items()},
    }
    results = record.begin(args.out, OP, {"gone": 0.2}, settings, argv)
    for name, sizes in SIZES.items():
        results.add(name, measure(name, SMALLEST if args.quick else sizes, effort))
        print(f"{name}: {results.cases[name]['gone']}", flush=True)
    print(f"\n{report(results.run)}\n\n{args.out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
