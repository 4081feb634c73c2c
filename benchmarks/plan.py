"""Plans beside what people use now, at equal peak: memopt.plan, PyTorch's checkpointing.

On the CPU in float32, on a GPU larger and in bfloat16; a step is forward, loss and backward. Four
models: **chain**, alike pre-LN
transformer blocks; **ladder**, blocks of widths that double on the way down and halve on the way
up, as in a U-Net; **encoder-decoder**, whose second half also attends to what the first half made
of four times as many tokens, as in T5; **wide and narrow**, in turns blocks whose middle is 4 and
16 times as wide. Each setting by hand (torch.utils.checkpoint without reentrance around every
block, around every second one, recipes in every block, checkpoint_sequential with about sqrt(L)
segments where there is one chain) has its peak; a plan for exactly that peak stands beside it, and
plans for shares of the plain step's peak. Results of before hold rotor's as well: NOTES.md.

Peaks count the weights, the input and what the allocator says on top of them, as budgets do. Times
are taken in turns as in harness.py; `over_plain` is a way's time over the plain step's in the same
round. Where a plan has recipes it runs memopt's ops, elsewhere PyTorch's; so do the recipes by
hand.

`python -m benchmarks.plan [--device cuda] [--quick] [--seed N] [--minutes N] [--out FILE.json]`
writes the JSON, the figure beside it, and prints the table.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import memopt
from benchmarks import clocks, record
from benchmarks.cli import has_device, in_time, parse_ways
from benchmarks.compile import Block
from benchmarks.harness import Effort, compared, effort_of
from benchmarks.memory import peak_bytes
from benchmarks.plan_models import Every, Model, Segments, Sizes, Turn, layers_of
from benchmarks.summary import describe, quartiles, table
from memopt.applied import assign
from memopt.assignment import KEEP

OP = "plan"
FULL = Effort(rounds=200, min_rounds=7, case_seconds=200.0, sample_seconds=0.05)
PLAIN = "plain"
RECIPES = "recipes in every block"
SHARES = (0.5, 0.25)
"""Budgets as shares of the plain step's peak."""

SIZES = {
    "chain": Sizes(12, 128, 4, 256),
    "ladder": Sizes(4, 64, 6, 256),
    "encoder-decoder": Sizes(8, 96, 4, 256),
    "wide and narrow": Sizes(8, 96, 4, 256),
}
CUDA_EFFORT = Effort(rounds=15, min_rounds=7, case_seconds=20.0, sample_seconds=0.1)
CUDA_SIZES = {
    "chain": Sizes(16, 1024, 16, 512),
    "ladder": Sizes(6, 256, 16, 1024),
    "encoder-decoder": Sizes(12, 768, 16, 512),
    "wide and narrow": Sizes(12, 768, 16, 512),
}
SMALLEST = {name: Sizes(2, 32, 1, 16) for name in SIZES} | {"chain": Sizes(3, 32, 1, 16)}


class Way(NamedTuple):
    peak: int
    """Bytes, with the weights and the input: as a budget counts."""
    run: Callable[[], None]
    predicted: float | None = None
    """The predicted time of a plan over the plain step's."""


def way(
    model: nn.Module, x: Tensor, run: Callable[[], None], predicted: float | None = None
) -> Way:
    """The way of a step that leaves gradients. Their memory counts."""
    run()
    model.zero_grad(set_to_none=True)
    most = peak_bytes(run, next(model.parameters()).device)
    model.zero_grad(set_to_none=True)
    there = x.nbytes + sum(p.nbytes for p in model.parameters())
    return Way(there + most, run, predicted)


def step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(x).backward()

    return run


def by_hand(layers: Sequence[nn.Module], x: Tensor) -> Iterator[tuple[str, Way]]:
    """PyTorch's ways, and memopt's recipes."""
    for name, kind, every in (
        (PLAIN, Model, 0),
        ("checkpoint every block", Every, 1),
        ("checkpoint every 2nd block", Every, 2),
        ("checkpoint_sequential, sqrt", Segments, 0),
        (RECIPES, Model, 0),
    ):
        if kind is Segments and any(isinstance(layer, Turn) for layer in layers):
            continue
        model = kind(copy.deepcopy(layers))
        if every:
            model.every = every
        if name == RECIPES:
            memopt.convert(model)
        yield name, way(model, x, step(model, x))


def by_plan(
    layers: Sequence[nn.Module], x: Tensor, budgets: Mapping[str, int], plain: Way
) -> Iterator[tuple[str, Way]]:
    """memopt's, one for each budget, of one profile. The blocks may be treated differently, what is
    between them stays. Budgets that have the same plan share its step, and `plain` is that of the
    plan which does nothing.
    """
    made: dict[Any, Way] = {}
    model = Model(copy.deepcopy(layers))
    rich = memopt.plan(model, x, 1 << 50, optimizer=None, blocks=Block, steps=7)
    for name, budget in budgets.items():
        try:
            plan = rich.within(budget)
        except memopt.BudgetTooSmall as error:
            print(f"{name}: below the floor, {error.floor / 1e6:.1f} MB", flush=True)
            continue
        choices = tuple(plan.assignment.choices.values())
        if set(choices) == {KEEP}:
            made[choices] = plain._replace(predicted=1 + plan.added)
        elif choices not in made:
            mine = Model(copy.deepcopy(layers))
            assign(mine, plan.assignment)
            made[choices] = way(mine, x, step(mine, x), 1 + plan.added)
        yield name, made[choices]


def ways_of(name: str, sizes: Sizes, device: torch.device) -> dict[str, Way]:
    torch.manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    layers = [layer.to(device, dtype) for layer in layers_of(name, sizes)]
    x = torch.randn(sizes.rows, sizes.tokens, sizes.width, device=device, dtype=dtype)
    ways = dict(by_hand(layers, x))
    plain = ways[PLAIN].peak
    budgets = {f"plan at {hand}": ways[hand].peak for hand in ways if hand != PLAIN}
    budgets |= {f"plan at {share:.0%}": int(share * plain) for share in SHARES}
    budgets["plan without a limit"] = 1 << 50
    return ways | dict(by_plan(layers, x, budgets, ways[PLAIN]))


def measure(ways: Mapping[str, Way], device: torch.device, effort: Effort) -> dict[str, Any]:
    """The record of a case, as it stands in the JSON file."""
    first = {each.run: name for name, each in reversed(ways.items())}
    runs = {name: each.run for name, each in ways.items() if first[each.run] == name}
    about = {name: {"peak_bytes": ways[name].peak} for name in runs}
    record = compared(runs, clocks.StepClock(device), effort, PLAIN, "over_plain", about)
    timed = record["variants"]
    record["variants"] = {
        name: {**timed[first[each.run]], "predicted_over_plain": each.predicted}
        for name, each in ways.items()
    }
    return record


def report(run: Mapping[str, Any]) -> str:
    """The run as Markdown."""
    head = ["", "", "peak", "of plain's", "time over plain's", "predicted"]
    rows = []
    for name, case in run["cases"].items():
        plain = case["variants"][PLAIN]["peak_bytes"]
        for label, found in case["variants"].items():
            over, guess = found["over_plain"], found["predicted_over_plain"]
            rows.append(
                [
                    name,
                    label,
                    f"{found['peak_bytes'] / 1e6:.1f} MB",
                    f"{found['peak_bytes'] / plain:.2f}",
                    quartiles(over, 3),
                    "" if guess is None else f"{guess:.3f}",
                ]
            )
    return "\n\n".join(["# Plans", describe(dict(run)), table(head, rows)])


def draw(cases: Mapping[str, Any], out: Path) -> None:
    from benchmarks import plot  # only here: measuring needs no matplotlib

    figure, panels = plot.plt.subplots(
        1, len(cases), figsize=(6 * len(cases), 4.2), layout="constrained", squeeze=False
    )
    for axes, (case, found) in zip(panels[0], cases.items(), strict=True):
        variants = found["variants"]
        plain = variants[PLAIN]["peak_bytes"]
        for label, is_kind, style in (
            ("memopt.plan", lambda n: n.startswith("plan "), {"fmt": "o-", "color": "#3b7dd8"}),
            (RECIPES, lambda n: n == RECIPES, {"fmt": "v", "color": "#2f8f4e"}),
            ("rotor", lambda n: n.startswith("rotor"), {"fmt": "^--", "color": "#ce5c00"}),
            (
                "torch.utils.checkpoint",
                lambda n: n.startswith("checkpoint"),
                {"fmt": "s", "color": "#5f6b76"},
            ),
            (PLAIN, lambda n: n == PLAIN, {"fmt": "D", "color": "#222222"}),
        ):
            kind = [v for name, v in variants.items() if is_kind(name)]
            points = [(v["peak_bytes"] / plain, v["over_plain"]) for v in kind]
            plot.with_quartiles(axes, points, capsize=2, label=label, **style)
        axes.set_title(case, loc="left", fontsize=10)
        axes.set_xlabel("peak of a step, of the plain step's")
        axes.set_ylabel("time of a step, of the plain step's")
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.25)
    figure.savefig(out, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_ways(OP, argv, devices=("cpu", "cuda"))
    if not has_device(OP, args.device):
        return 2
    device = torch.device(args.device)
    on_cuda = device.type == "cuda"
    effort = effort_of(args, FULL, CUDA_EFFORT)
    keeps_memory = not on_cuda and clocks.keep_freed_memory()  # as a GPU's allocator does
    sizes = SMALLEST if args.quick else CUDA_SIZES if on_cuda else SIZES
    settings = {
        **dataclasses.asdict(effort),
        "keeps_freed_memory": keeps_memory,
        "sizes": {name: each._asdict() for name, each in sizes.items()},
    }
    results = record.begin(args.out, OP, {}, settings, argv, device)
    for name, each in in_time(OP, args, sizes):
        results.add(name, measure(ways_of(name, each, device), device, effort))
        print(f"{name} done", flush=True)
    figure = args.out.with_suffix(".png")
    draw(results.cases, figure)
    text = report(results.run)
    print(f"\n{text}\n\n{args.out}\n{figure}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
