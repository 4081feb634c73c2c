"""Bytes and time of compiled models: torch.compile and memopt.compile.

Two parts, on the CPU in float32; a step is forward, loss and backward. **Families**: models of
transformers, compiled both ways. **Curve**: a pre-LN transformer within budgets:
`torch._functorch.config.activation_memory_budget`, which
`torch.autograd.graph.region_activation_memory_budget` sets for a graph, and memopt.compile's.

Bytes are the allocator's (memopt.memory.allocator): what is held when forward ends, and the most at
any time. Times are taken in turns as in harness.py; `over_torch` is a way's time over plain
torch.compile's in the same round, so above 1 is slower.

`python -m benchmarks.compile [--quick] [--seed N] [--out FILE.json]` writes the JSON, the figure
beside it, and prints the table. With --quick only the smallest models are compiled.
"""

from __future__ import annotations

import dataclasses
import os
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

import memopt
from benchmarks import record
from benchmarks.cli import parse_ways
from benchmarks.clocks import CpuClock
from benchmarks.convert_models.sizes import Sizes
from benchmarks.harness import Effort, compared, effort_of
from benchmarks.summary import describe, table
from memopt.memory.allocator import LiveBytes

OP = "compile"
GOAL, GOAL_OF_ONE = 1.02, 1.05
FULL = Effort(rounds=31, min_rounds=11, case_seconds=20.0, sample_seconds=0.05)

SIZES = Sizes(n=2, h=256, heads=8, kv_heads=4, m=1024, words=4096, tokens=128)
ONE_LAYER = dataclasses.replace(SIZES, n=1, words=1024)
FAMILIES = {
    **dict.fromkeys(("BERT", "GPT-2", "GPT-NeoX", "Llama", "ViT"), SIZES),
    **dict.fromkeys(
        ("RoBERTa", "Qwen3", "Gemma", "Mistral", "T5", "Whisper", "ModernBERT"), ONE_LAYER
    ),
}
"""Those of one layer take half as long to compile."""
SMALLEST = Sizes(n=1, h=32, heads=4, kv_heads=2, m=64, words=99, tokens=16)

TORCH, MEMOPT = "torch.compile", "memopt.compile"
SHARES = (0.8, 0.6, 0.4, 0.0)
"""Of `activation_memory_budget`, of what plain torch.compile saves."""
BUDGETS = (0.8, 0.75, 0.7)
"""Of memopt.compile, of plain torch.compile's peak."""


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
    """Its forward is the loss."""

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
    """Of a step whose `forward` gives the loss; compiles it."""

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


def of_its_own(model: nn.Module, number: int) -> None:
    """Gives the model's forward a code object of its own, by which torch.compile tells graphs
    apart: those of equal options would otherwise be one.
    """
    forward = type(model).forward
    code = forward.__code__.replace(co_name=f"forward_{number}")
    own = types.FunctionType(code, forward.__globals__, None, forward.__defaults__)
    model.forward = own.__get__(model)


def family(name: str, sizes: Sizes) -> dict[str, Way]:
    from benchmarks.convert_models.model_terms import model_and_inputs  # needs transformers

    torch.compiler.reset()
    ways = {}
    for label, compile in ((TORCH, torch.compile), (MEMOPT, memopt.compile)):
        model, inputs = model_and_inputs(name, sizes)
        model = model.float()
        inputs = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}
        compiled = compile(lambda model=model, inputs=inputs: model(**inputs).loss)
        ways[label] = way(compiled, model)
    return ways


def curve(layers: int, width: int, tokens: int, shares: Sequence[float]) -> dict[str, Way]:
    """By name; a budget below the floor has no way."""
    x = torch.randn(2, tokens, width)
    ways: dict[str, Way] = {}

    def add(name: str, compile: Callable[[nn.Module], Any], share: float = 1.0) -> None:
        torch.manual_seed(0)
        model = Stack(layers, width)
        of_its_own(model, len(ways))
        with torch._functorch.config.patch(activation_memory_budget=share):
            compiled = compile(model)
            try:
                ways[name] = way(lambda: compiled(x), model)
            except torch._dynamo.exc.BackendCompilerFailed as error:
                if "compile: budget must be at least" not in str(error):
                    raise
                print(f"{name}: below the floor", flush=True)

    add(TORCH, torch.compile)
    for share in shares:
        add(f"{TORCH} {share}", torch.compile, share)
    add(MEMOPT, memopt.compile)
    for share in BUDGETS if shares else ():
        add(f"{MEMOPT} {share}", lambda model, b=share: memopt.compile(model, budget=b))
    return ways


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
            time = f"{over['median']:.3f} ({over['q1']:.3f} to {over['q3']:.3f})"
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
    return (
        f"Families: {mean:.3f} of torch.compile's time in the geometric mean, at most "
        f"{ratios[worst]:.3f} ({worst}); goals {GOAL} and {GOAL_OF_ONE} "
        f"{'reached' if reached else 'missed'}."
    )


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
    args = parse_ways(OP, argv)
    effort = effort_of(args, FULL)
    families = {"GPT-2": SMALLEST} if args.quick else FAMILIES
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
    for name, sizes in families.items():
        results.add(name, measure(family(name, sizes), effort))
        print(f"{name} done", flush=True)
    torch.compiler.reset()
    ways = curve(layers, width, tokens, () if args.quick else SHARES)
    results.add("curve", measure(ways, effort))
    figure = args.out.with_suffix(".png")
    draw(results.cases["curve"]["variants"], figure)
    text = report(results.run)
    print(f"\n{text}\n\n{args.out}\n{figure}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
