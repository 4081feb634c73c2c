"""Bytes and time of compiled models: torch.compile and memopt.compile.

Two parts, on the CPU in float32; a step is forward, loss and backward. **Families**: models of
transformers, compiled both ways; five of them, and two with dropout, also within budgets:
torch.compile at `torch._functorch.config.activation_memory_budget` (which
`torch.autograd.graph.region_activation_memory_budget` sets for a graph) of 1, 0.7, 0.5, 0.3 and 0,
memopt.compile with each of the peaks that these have as its budget, and at the lowest peak that it
reaches. **Curve**: a pre-LN transformer within budgets of both.

Bytes are the allocator's (memopt.memory.allocator): what is held when forward ends, and the most at
any time. Times are taken in turns as in harness.py; `over_torch` is a way's time over plain
torch.compile's in the same round, so above 1 is slower.

`python -m benchmarks.compile [--quick] [--seed N] [--filter TEXT] [--minutes M] [--out FILE.json]`
writes the JSON, the figure beside it, and prints the table. With --quick only the smallest models
are compiled, with --filter those whose name contains TEXT.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import statistics
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx

import memopt
from benchmarks import record
from benchmarks.cli import in_time, parse_ways
from benchmarks.clocks import CpuClock
from benchmarks.convert_models.sizes import Sizes
from benchmarks.harness import Effort, compared, effort_of
from benchmarks.summary import describe, quartiles, table
from memopt.memory.allocator import LiveBytes

OP = "compile"
GOAL, GOAL_OF_ONE = 1.02, 1.05
FULL = Effort(rounds=31, min_rounds=11, case_seconds=20.0, sample_seconds=0.05)

SIZES = Sizes(n=2, h=256, heads=8, kv_heads=4, m=1024, words=4096, tokens=128)
ONE_LAYER = dataclasses.replace(SIZES, n=1, words=1024)
DROPOUT = " with dropout"
BUDGETED = {
    **dict.fromkeys(("Llama", "BERT", "ViT", "T5", "GPT-2"), ONE_LAYER),
    **{name + DROPOUT: ONE_LAYER for name in ("BERT", "GPT-2")},
}
FAMILIES = {
    "GPT-NeoX": SIZES,
    **dict.fromkeys(("RoBERTa", "Qwen3", "Gemma", "Mistral", "Whisper", "ModernBERT"), ONE_LAYER),
}
"""Models of one layer take half as long to compile."""
SMALLEST = Sizes(n=1, h=32, heads=4, kv_heads=2, m=64, words=99, tokens=16)

TORCH, MEMOPT = "torch.compile", "memopt.compile"
SHARES = (0.7, 0.5, 0.3, 0.0)
"""Values of `activation_memory_budget`: shares of what plain torch.compile saves."""
AT, LOWEST = " at the peak of ", " at its lowest peak"
_MOST_WAYS = 64
BUDGETS = (0.8, 0.75, 0.7)
"""Budgets of memopt.compile, as shares of plain torch.compile's peak."""


class Block(nn.Module):
    """A pre-LN transformer block in PyTorch's own ops."""

    def __init__(self, width: int = 64, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Stack(nn.Module):
    """A model whose forward returns the loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


class Way(NamedTuple):
    """A compiled step, and its bytes."""

    held: int
    most: int
    run: Callable[[], None]


def way(forward: Callable[[], Tensor], model: nn.Module) -> Way:
    """The way of a step whose `forward` gives the loss; compiles it."""

    def run() -> None:
        model.zero_grad(set_to_none=True)
        forward().backward()

    run()
    run()
    model.zero_grad(set_to_none=True)
    with LiveBytes() as live:
        loss = forward()
        live.mark()
        loss.backward()
    return Way(live.marks[0].nbytes, live.most, run)


def of_its_own(function: Any, number: int) -> types.FunctionType:
    """The function with a code object of its own, by which torch.compile tells graphs apart: it
    compiles one code a few times at most, and those of equal options would be one graph.
    """
    code = function.__code__.replace(co_name=f"step_{number}")
    return types.FunctionType(
        code, function.__globals__, None, function.__defaults__, function.__closure__
    )


Make = Callable[[], tuple[nn.Module, Callable[[], Tensor]]]
"""A new model, and its forward to the loss."""


def begin_compiling() -> None:
    """Forget what was compiled. Beyond the limit, which is for each function, ways would run
    without a graph.
    """
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = _MOST_WAYS


def own_backend() -> Callable[[Any, Any], Any]:
    """Inductor as a backend that equals no other: of equal ones, whatever the share that they were
    compiled with, the graph behind a break is one.
    """

    def backend(graph: Any, inputs: Any) -> Any:
        return compile_fx(graph, inputs)

    return backend


class Compiled:
    """The compiled ways of one model, by name. A budget below the floor has none."""

    def __init__(self, make: Make) -> None:
        begin_compiling()
        self._make = make
        self.ways: dict[str, Way] = {}
        self._tried = 0

    def torchs(self, share: float = 1.0) -> str:
        """The name of torch.compile's way with a share of what it would save."""
        name = TORCH if share == 1 else f"{TORCH} {share}"
        with torch._functorch.config.patch(activation_memory_budget=share):
            self._add(name, functools.partial(torch.compile, backend=own_backend()))
        return name

    def memopts(self, name: str, budget: int | float | None = None) -> int | None:
        """Add memopt.compile's; the bytes that would do where the budget is below the floor."""
        try:
            self._add(name, lambda forward: memopt.compile(forward, budget=budget))
        except torch._dynamo.exc.BackendCompilerFailed as error:
            said = re.search(r"compile: budget must be at least ([\d,]+) bytes", str(error))
            if said is None:
                raise
            print(f"{name}: below the floor", flush=True)
            return int(said[1].replace(",", ""))
        return None

    def lowest(self) -> None:
        """Add memopt.compile's lowest peak: the floor of the graph that has the highest."""
        budget: int | None = 1
        while budget is not None:
            budget = self.memopts(MEMOPT + LOWEST, budget)

    def _add(self, name: str, compile: Callable[[Any], Any]) -> None:
        torch.manual_seed(0)
        model, forward = self._make()
        self._tried += 1
        self.ways[name] = way(compile(of_its_own(forward, self._tried)), model)


def in_float32(name: str, sizes: Sizes) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model of a family, and its inputs."""
    from benchmarks.convert_models.model_terms import model_and_inputs  # needs transformers

    model, inputs = model_and_inputs(name, sizes)
    return model.float(), {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}


def family(name: str, sizes: Sizes, shares: Sequence[float] = ()) -> dict[str, Way]:
    """The ways of a family; with `shares` of torch.compile's budget, at each of its peaks."""

    def make() -> tuple[nn.Module, Callable[[], Tensor]]:
        model, inputs = in_float32(name.removesuffix(DROPOUT), sizes)
        for module in model.modules() if name.endswith(DROPOUT) else ():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
        return model, lambda: model(**inputs).loss

    compiled = Compiled(make)
    peaks = {at: compiled.ways[at].most for at in map(compiled.torchs, (1.0, *shares))}
    compiled.memopts(MEMOPT)
    if shares:
        for at, most in peaks.items():
            compiled.memopts(MEMOPT + AT + at, most)
        compiled.lowest()
    return compiled.ways


def curve(layers: int, width: int, tokens: int, shares: Sequence[float]) -> dict[str, Way]:
    """The ways of a stack of blocks."""
    x = torch.randn(2, tokens, width)

    def make() -> tuple[nn.Module, Callable[[], Tensor]]:
        model = Stack(layers, width)
        return model, lambda: model(x)

    compiled = Compiled(make)
    for share in (1.0, *shares):
        compiled.torchs(share)
    compiled.memopts(MEMOPT)
    for share in BUDGETS if shares else ():
        compiled.memopts(f"{MEMOPT} {share}", share)
    return compiled.ways


def measure(ways: Mapping[str, Way], effort: Effort) -> dict[str, Any]:
    """The record of a case, as it stands in the JSON file."""
    runs = {name: each.run for name, each in ways.items()}
    about = {
        name: {"held_bytes": each.held, "most_bytes": each.most} for name, each in ways.items()
    }
    return compared(runs, CpuClock(), effort, TORCH, "over_torch", about)


def report(run: Mapping[str, Any]) -> str:
    """The run as Markdown."""
    return "\n\n".join(["# Compiled models", describe(dict(run)), tables(run)])


def tables(run: Mapping[str, Any]) -> str:
    """Whether the goals were reached, and what each way took."""
    head = ["", "", "held", "peak", "time over torch.compile's"]
    rows = []
    for name, case in run["cases"].items():
        for label, found in case["variants"].items():
            over = found["over_torch"]
            megabytes = [f"{found[key] / 1e6:.2f} MB" for key in ("held_bytes", "most_bytes")]
            time = quartiles(over, 3)
            rows.append([name, label, *megabytes, time])
    return "\n\n".join([verdict(run["cases"]), table(head, rows)])


def verdict(cases: Mapping[str, Any]) -> str:
    ratios = {
        name: case["variants"][MEMOPT]["over_torch"]["median"]
        for name, case in cases.items()
        if name != "curve"
    }
    if not ratios:
        return "No family was measured: transformers is not installed."
    mean, worst = statistics.geometric_mean(ratios.values()), max(ratios, key=ratios.__getitem__)
    reached = mean <= GOAL and ratios[worst] <= GOAL_OF_ONE
    lines = [
        f"Families: {mean:.3f} of torch.compile's time in the geometric mean, at most "
        f"{ratios[worst]:.3f} ({worst}); goals {GOAL} and {GOAL_OF_ONE} "
        f"{'reached' if reached else 'missed'}."
    ]
    lines += [of_budgets(name, case["variants"]) for name, case in cases.items()]
    return "\n\n".join(line for line in lines if line)


def of_budgets(name: str, variants: Mapping[str, Any]) -> str:
    """Counts torch.compile's peaks at which memopt.compile is no higher and no slower."""
    if not has_budgets(variants):
        return ""
    number, missed = len(torchs_of(variants)), missed_peaks(variants)
    return (
        f"{name}: {number - len(missed)} of torch.compile's {number} peaks are reached in no more "
        f"than {GOAL} of its time{', not ' + ', '.join(missed) if missed else ''}; the lowest peak "
        f"is {over_lowest(variants):.3f} of torch.compile's lowest."
    )


def has_budgets(variants: Mapping[str, Any]) -> bool:
    """Whether a case has memopt.compile at torch.compile's peaks."""
    return any(AT in label for label in variants)


def torchs_of(variants: Mapping[str, Any]) -> dict[str, Any]:
    """The ways of torch.compile."""
    return {label: found for label, found in variants.items() if label.startswith(TORCH)}


def missed_peaks(variants: Mapping[str, Any]) -> list[str]:
    """The peaks of torch.compile where memopt.compile is higher, or slower beyond the spread."""
    missed = []
    for label, theirs in torchs_of(variants).items():
        ours = variants.get(MEMOPT + AT + label)
        if ours is None:
            missed.append(f"{label} (below the floor)")
            continue
        beyond = ours["over_torch"]["q1"] / theirs["over_torch"]["q3"]
        if ours["most_bytes"] > theirs["most_bytes"] or beyond > GOAL:
            peak = ours["most_bytes"] / theirs["most_bytes"]
            time = ours["over_torch"]["median"] / theirs["over_torch"]["median"]
            missed.append(f"{label} ({peak:.3f} of its peak, {time:.3f} of its time)")
    return missed


def over_lowest(variants: Mapping[str, Any]) -> float:
    """The lowest peak of memopt.compile, of torch.compile's lowest."""
    own = min(f["most_bytes"] for label, f in variants.items() if label.startswith(MEMOPT))
    lowest: int = min(found["most_bytes"] for found in torchs_of(variants).values())
    return own / lowest


def draw(variants: Mapping[str, Any], out: Path) -> None:
    from benchmarks import plot  # only here: measuring needs no matplotlib

    labels = {
        TORCH: "torch.compile, activation_memory_budget 1 to 0",
        MEMOPT: "memopt.compile, without and with budget",
    }
    figure, axes = plot.plt.subplots(figsize=(6, 4), layout="constrained")
    for who, colour in ((TORCH, "#ce5c00"), (MEMOPT, "#3465a4")):
        own = [found for name, found in variants.items() if name.split()[0] == who]
        points = [(found["most_bytes"] / 1e6, found["over_torch"]) for found in own]
        style = {"fmt": "o-", "color": colour, "capsize": 2, "label": labels[who]}
        plot.with_quartiles(axes, points, **style)
    axes.set_xlabel("peak of a step, MB")
    axes.set_ylabel("time of a step over torch.compile's")
    axes.legend()
    figure.savefig(out, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_ways(OP, argv, devices=("cpu",))
    effort = effort_of(args, FULL)
    families = {"GPT-2": SMALLEST} if args.quick else {**BUDGETED, **FAMILIES}
    budgeted, shares = (families, SHARES[1:2]) if args.quick else (BUDGETED, SHARES)
    layers, width, tokens = (1, 32, 16) if args.quick else (2, 256, 256)
    settings = {
        **dataclasses.asdict(effort),
        "families": {name: dataclasses.asdict(sizes) for name, sizes in families.items()},
        "curve": {"layers": layers, "width": width, "tokens": tokens},
    }
    results = record.begin(
        args.out, OP, {"geometric mean": GOAL, "largest": GOAL_OF_ONE}, settings, argv
    )
    try:
        import transformers  # noqa: F401
    except ImportError:
        families = {}
        print("compile: transformers is not installed, no families", flush=True)
    for name, sizes in in_time(OP, args, families):
        ways = family(name, sizes, shares if name in budgeted else ())
        results.add(name, measure(ways, effort))
        print(f"{name} done", flush=True)
    ways = curve(layers, width, tokens, () if args.quick else SHARES)
    results.add("curve", measure(ways, effort))
    figure = args.out.with_suffix(".png")
    draw(results.cases["curve"]["variants"], figure)
    text = report(results.run)
    print(f"\n{text}\n\n{args.out}\n{figure}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
