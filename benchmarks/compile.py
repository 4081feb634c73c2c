"""Bytes and time of compiled models: torch.compile, with its `activation_memory_budget`, and
memopt.compile, with its budget.

A step is forward and backward of a pre-LN transformer with its loss, on the CPU, in float32. Bytes
are the allocator's (memopt.live_bytes): what is held when forward ends, and the most at any time.
Times are the medians of the ratios to plain torch.compile within rounds in which all take turns.

`python -m benchmarks.compile [--out FILE.json] [--figure FILE.png] [--layers N] [--rounds N]`
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from benchmarks import record
from benchmarks.cli import RESULTS
from memopt.live_bytes import LiveBytes

OP = "compile"
SHARES = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


class Measured(NamedTuple):
    held: int
    most: int
    run: Callable[[], object]


def measured(compiled: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> Measured:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        compiled(x).backward()

    step()
    step()
    model.zero_grad(set_to_none=True)
    with LiveBytes() as live:
        loss = compiled(x)
        live.mark()
        loss.backward()
    return Measured(live.marks[0].nbytes, live.most, step)


def of_its_own(model: nn.Module, name: str) -> Callable[..., Any]:
    """The model's forward with a code object of its own, by which torch.compile tells graphs apart:
    those of equal options would otherwise be one.
    """
    forward = type(model).forward
    return types.FunctionType(forward.__code__.replace(co_name=name), globals()).__get__(model)


def variants(layers: int, width: int, x: Tensor) -> dict[str, Measured]:
    """By name; those whose budget is below the floor are not there."""
    found: dict[str, Measured] = {}

    def add(name: str, compile: Callable[[nn.Module], Any], budget: float = 1.0) -> None:
        torch.manual_seed(0)
        model = Model(layers, width)
        model.forward = of_its_own(model, f"forward_{len(found)}")
        with torch._functorch.config.patch(activation_memory_budget=budget):
            try:
                found[name] = measured(compile(model), model, x)
            except torch._dynamo.exc.BackendCompilerFailed as error:
                if "compile: budget must be at least" not in str(error):
                    raise

    for share in SHARES:
        add(f"torch {share}", torch.compile, share)
    add("memopt", memopt.compile)
    for share in SHARES:
        if share:
            add(f"memopt {share}", lambda model, b=share: memopt.compile(model, budget=b))
    return found


def ratios(found: dict[str, Measured], rounds: int) -> dict[str, float]:
    """Of each one's time to plain torch.compile's: the median over the rounds."""
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, one in found.items():
            begin = time.perf_counter()
            one.run()
            times[name].append(time.perf_counter() - begin)
    plain = times["torch 1.0"]
    return {
        name: statistics.median(own / base for own, base in zip(mine, plain, strict=True))
        for name, mine in times.items()
    }


def draw(cases: dict[str, dict[str, Any]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for who, colour in (("torch", "#ce5c00"), ("memopt", "#3465a4")):
        points = sorted(
            (case["most_bytes"] / 1e6, case["time_ratio"])
            for name, case in cases.items()
            if name.split()[0] == who
        )
        axes.plot(*zip(*points, strict=True), "o-", color=colour, label=f"{who}.compile")
    axes.set_xlabel("peak, MB")
    axes.set_ylabel("time of a step over plain torch.compile's")
    axes.legend()
    figure.savefig(out, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{OP}")
    add = parser.add_argument
    add("--out", type=Path, default=RESULTS / f"cpu_{OP}.json")
    add("--figure", type=Path, default=None, help="draw peak against time there")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=256)
    add("--tokens", type=int, default=256)
    add("--rounds", type=int, default=15)
    args = parser.parse_args(argv)
    x = torch.randn(2, args.tokens, args.width)
    found = variants(args.layers, args.width, x)
    times = ratios(found, args.rounds)
    cases = {
        name: {"held_bytes": m.held, "most_bytes": m.most, "time_ratio": round(times[name], 4)}
        for name, m in found.items()
    }
    settings: dict[str, Any] = {
        name: getattr(args, name) for name in ("layers", "width", "tokens", "rounds")
    }
    result = record.Record(args.out, {"schema": record.SCHEMA, "settings": settings}, resume=False)
    for name, case in cases.items():
        result.add(name, case)
        print(f"{name:12} {case}")
    if args.figure is not None:
        draw(cases, args.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
