"""Plans beside what people use now, at equal peak: memopt.plan, PyTorch's checkpointing, rotor.

On the CPU in float32; a step is forward, loss and backward. Four models: **chain**, alike pre-LN
transformer blocks; **ladder**, blocks of widths that double on the way down and halve on the way
up, as in a U-Net; **encoder-decoder**, whose second half also attends to what the first half made
of four times as many tokens, as in T5; **wide and narrow**, in turns blocks whose middle is 4 and
16 times as wide. Each setting by hand (torch.utils.checkpoint without reentrance around every
block, around every second one, recipes in every block, checkpoint_sequential with about sqrt(L)
segments where there is one chain; and for the chain rotor's schedules for shares of what the plain
step takes) has its peak; a plan for exactly that peak stands beside it, and plans for shares of the
plain step's peak.

Peaks are what the allocator says (memopt.live_bytes) on top of the weights. Times are taken in
turns as in harness.py; `over_plain` is a way's time over the plain step's in the same round. Where
a plan has recipes it runs memopt's ops, elsewhere PyTorch's; so do the recipes by hand.

`python -m benchmarks.plan [--quick] [--seed N] [--out FILE.json]` writes the JSON, the figure
beside it, and prints the table.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import memopt
from benchmarks import clocks, record, rotor
from benchmarks.cli import parse_ways
from benchmarks.compile import Block
from benchmarks.harness import QUICK, Effort, alternate, spread
from benchmarks.summary import describe, table
from memopt.live_bytes import LiveBytes

OP = "plan"
FULL = Effort(rounds=25, min_rounds=7, case_seconds=55.0, sample_seconds=0.05)
PLAIN = "plain"
RECIPES = "recipes in every block"
SHARES = (0.5, 0.25)
"""Of the plain step's peak."""
ROTOR_SHARES = (0.75, 0.5, 0.3)
"""Of the plain step's peak without the weights."""


class Sizes(NamedTuple):
    layers: int
    width: int
    rows: int
    tokens: int


SIZES = {
    "chain": Sizes(12, 128, 4, 256),
    "ladder": Sizes(4, 64, 6, 256),
    "encoder-decoder": Sizes(8, 96, 4, 256),
    "wide and narrow": Sizes(8, 96, 4, 256),
}
SMALLEST = {name: Sizes(2, 32, 1, 16) for name in SIZES} | {"chain": Sizes(3, 32, 1, 16)}


class Wider(nn.Module):
    """Between two levels: half the tokens, twice the width; or back."""

    def __init__(self, width: int, wanted: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, wanted)
        self.down = wanted > width

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, ::2]) if self.down else self.linear(x).repeat_interleave(2, dim=1)


class Decoder(Block):
    """Attends to what the encoder made as well."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.norm = nn.LayerNorm(width)
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.cross = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        assert memory is not None  # a model calls it behind a Turn
        q = self.q(self.norm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(memory).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        return super().forward(x + self.cross(attended.transpose(1, 2).flatten(2)))


class Turn(nn.Module):
    """From the encoder's output to the decoder's input, of a quarter of its tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, ::4]


class Wide(Block):
    """Its middle is 16 times as wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.up, self.down = nn.Linear(width, 16 * width), nn.Linear(16 * width, width)


class Mean(nn.Module):
    """The loss."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def layers_of(name: str, sizes: Sizes) -> list[nn.Module]:
    """Blocks, and between levels what changes the width."""
    if name == "chain":
        return [Block(sizes.width, 4) for _ in range(sizes.layers)]
    if name == "wide and narrow":
        return [(Wide if place % 2 else Block)(sizes.width, 4) for place in range(sizes.layers)]
    if name == "encoder-decoder":
        encoder = [Block(sizes.width, 4) for _ in range(sizes.layers // 2)]
        decoder = [Decoder(sizes.width, 4) for _ in range(sizes.layers // 2)]
        return [*encoder, Turn(), *decoder]
    widths = [sizes.width << level for level in range(sizes.layers // 2)]
    way = [*widths, 2 * widths[-1], *reversed(widths)]
    layers: list[nn.Module] = []
    for width, following in zip(way, [*way[1:], None], strict=True):
        layers += [Block(width, 4), Block(width, 4)]
        if following is not None:
            layers.append(Wider(width, following))
    return layers


class Model(nn.Module):
    """Its forward is the loss."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.mean = Mean()

    def forward(self, x: Tensor) -> Tensor:
        encoded: tuple[Tensor, ...] = ()
        blocks = 0
        for layer in self.layers:
            if isinstance(layer, Turn):
                encoded = (x,)
                x = layer(x)
            elif isinstance(layer, Block):
                x = self.run(blocks, layer, (x, *encoded))
                blocks += 1
            else:
                x = layer(x)
        return self.mean(x)

    def run(self, number: int, block: Block, given: tuple[Tensor, ...]) -> Any:
        return block(*given)


class Every(Model):
    """Each `every`-th block is checkpointed by PyTorch."""

    every = 1

    def run(self, number: int, block: Block, given: tuple[Tensor, ...]) -> Any:
        if number % self.every == 0:
            return checkpoint(block, *given, use_reentrant=False)
        return block(*given)


class Segments(Model):
    """PyTorch's checkpoint_sequential."""

    def forward(self, x: Tensor) -> Tensor:
        count = round(len(self.layers) ** 0.5)
        return self.mean(checkpoint_sequential(self.layers, count, x, use_reentrant=False))


class Way(NamedTuple):
    peak: int
    """Bytes, weights included."""
    run: Callable[[], None]
    predicted: float | None = None
    """Of a plan: its time over the plain step's."""


def way(model: nn.Module, run: Callable[[], None], predicted: float | None = None) -> Way:
    """Of a step that leaves gradients. Their memory counts."""
    run()
    model.zero_grad(set_to_none=True)
    with LiveBytes() as live:
        run()
    model.zero_grad(set_to_none=True)
    weights = sum(p.nbytes for p in model.parameters())
    return Way(weights + live.most, run, predicted)


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
        yield name, way(model, step(model, x))


def by_rotor(layers: Sequence[nn.Module], x: Tensor, plain: int) -> Iterator[tuple[str, Way]]:
    model = Model(copy.deepcopy(layers))
    model(x).backward()  # so that gradients are there while it is measured
    modules = [*model.layers, model.mean]
    chain = rotor.measure(modules, x)
    weights = sum(p.nbytes for p in model.parameters())
    for share in ROTOR_SHARES:
        # Gradients of the weights are no part of a schedule.
        memory = share * (plain - weights) - weights
        found = rotor.rotor(chain, memory, 200) if memory > 0 else None
        if found is None:
            print(f"rotor {share}: no schedule", flush=True)
            continue
        mine = Model(copy.deepcopy(layers))
        parts = [*mine.layers, mine.mean]

        def run(mine: Model = mine, parts: Any = parts, found: Any = found) -> None:
            mine.zero_grad(set_to_none=True)
            rotor.run_chain(parts, found.schedule, x)

        yield f"rotor {share}", way(mine, run)


def by_plan(
    layers: Sequence[nn.Module], x: Tensor, budgets: Mapping[str, int]
) -> Iterator[tuple[str, Way]]:
    """memopt's, one for each budget, of one profile. The blocks may be treated differently, what is
    between them stays.
    """
    model = Model(copy.deepcopy(layers))
    rich = memopt.plan(model, x, 1 << 50, optimizer=None, blocks=Block, steps=7)
    for name, budget in budgets.items():
        try:
            plan = rich.within(budget)
        except memopt.BudgetTooSmall as error:
            print(f"{name}: below the floor, {error.floor / 1e6:.1f} MB", flush=True)
            continue
        mine = Model(copy.deepcopy(layers))
        plan.assignment.apply(mine)
        yield name, way(mine, step(mine, x), 1 + plan.added)


def ways_of(name: str, sizes: Sizes) -> dict[str, Way]:
    torch.manual_seed(0)
    layers = layers_of(name, sizes)
    x = torch.randn(sizes.rows, sizes.tokens, sizes.width)
    ways = dict(by_hand(layers, x))
    plain = ways[PLAIN].peak
    if name == "chain":
        ways |= dict(by_rotor(layers, x, plain))
    budgets = {f"plan at {hand}": ways[hand].peak for hand in ways if hand != PLAIN}
    budgets |= {f"plan at {share:.0%}": int(share * plain) for share in SHARES}
    budgets["plan without a limit"] = 1 << 50
    return ways | dict(by_plan(layers, x, budgets))


def measure(ways: Mapping[str, Way], effort: Effort) -> dict[str, Any]:
    """The record of a case, as it stands in the JSON file."""
    runs = {name: each.run for name, each in ways.items()}
    seconds, _ = alternate(runs, clocks.CpuClock(), effort)
    found = {}
    for name, each in ways.items():
        over = [own / base for own, base in zip(seconds[name], seconds[PLAIN], strict=True)]
        found[name] = {
            "peak_bytes": each.peak,
            "seconds": spread(seconds[name]),
            "over_plain": spread(over),
            "predicted_over_plain": each.predicted,
        }
    return {"rounds": len(seconds[PLAIN]), "variants": found}


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
                    f"{over['median']:.3f} ({over['q1']:.3f} to {over['q3']:.3f})",
                    "" if guess is None else f"{guess:.3f}",
                ]
            )
    return "\n\n".join(["# Plans", describe(dict(run)), table(head, rows)])


def draw(cases: Mapping[str, Any], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
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
            points = sorted(
                (v["peak_bytes"] / plain, *(v["over_plain"][q] for q in ("median", "q1", "q3")))
                for name, v in variants.items()
                if is_kind(name)
            )
            if points:
                peaks, medians, lows, highs = zip(*points, strict=True)
                below = [m - low for m, low in zip(medians, lows, strict=True)]
                above = [high - m for m, high in zip(medians, highs, strict=True)]
                axes.errorbar(peaks, medians, yerr=(below, above), capsize=2, label=label, **style)
        axes.set_title(case, loc="left", fontsize=10)
        axes.set_xlabel("peak of a step, of the plain step's")
        axes.set_ylabel("time of a step, of the plain step's")
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.25)
    figure.savefig(out, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_ways(OP, argv)
    effort = dataclasses.replace(QUICK if args.quick else FULL, seed=args.seed)
    keeps_memory = clocks.keep_freed_memory()  # as a GPU's allocator does
    sizes = SMALLEST if args.quick else SIZES
    header = record.header(
        OP,
        {},
        {
            **dataclasses.asdict(effort),
            "keeps_freed_memory": keeps_memory,
            "sizes": {name: each._asdict() for name, each in sizes.items()},
        },
        ["python", "-m", f"benchmarks.{OP}", *(sys.argv[1:] if argv is None else argv)],
        torch.device("cpu"),
        copy_bandwidths={},
    )
    results = record.Record(args.out, header, resume=False)
    for name, each in sizes.items():
        results.add(name, measure(ways_of(name, each), effort))
        print(f"{name} done", flush=True)
    figure = args.out.with_suffix(".png")
    draw(results.cases, figure)
    text = report({**results.header, "cases": results.cases})
    print(f"\n{text}\n\n{args.out}\n{figure}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
