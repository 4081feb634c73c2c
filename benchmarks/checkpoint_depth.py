"""Activation memory and recomputed work against depth, for each way to choose checkpoints.

`python -m benchmarks.checkpoint_depth [OPTIONS]`: a stack of pre-LN transformer blocks (the demo's)
is trained for a step without checkpoints, with every block a region, with segments by the sqrt rule
(memopt's and PyTorch's) and with memopt's optimal segments. Writes DEVICE_checkpoint_depth.json and
the figure beside it. Bytes are counted and the same in every run; no times are taken.

For each depth and policy: `held_bytes` is what forward leaves for backward, `peak_bytes` the most
during forward and backward, both beyond weights, gradients and input, which are there before;
`forwards_again` how many blocks backward ran again.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

import memopt
from benchmarks import record
from benchmarks.cli import RESULTS, has_device
from benchmarks.memory import held_bytes, peak_bytes
from memopt._checkpoint.segments import sqrt_segments
from memopt.demo.model import Block, ModelSize

OP = "checkpoint_depth"
DEPTHS = (4, 6, 8, 12, 16, 24, 32, 48, 64)
SIZE = ModelSize(layers=1, width=64, heads=4, context=128)
BATCH = 4

# The way to run the blocks; its colour and its name in the figure.
POLICIES = {
    "none": ("#5f6b76", "no checkpoints"),
    "every": ("#3b7dd8", "every block"),
    "torch_sqrt": ("#d98a29", "sqrt(L), torch.utils.checkpoint"),
    "sqrt": ("#c8467c", "sqrt(L), memopt"),
    "optimal": ("#2a9d8f", "optimal, memopt"),
}


class CountedBlock(Block):
    """Counts how often its forward begins."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def run_with(policy: str, model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    """The model's forward under `policy`. "every" wraps the blocks of `model`."""
    if policy == "every":
        memopt.apply_activation_checkpointing(model)
    if policy in ("none", "every"):
        return model
    if policy == "torch_sqrt":
        segments = len(sqrt_segments(len(model)))
        return lambda x: torch_checkpoint.checkpoint_sequential(
            model, segments, x, use_reentrant=False
        )
    return functools.partial(memopt.checkpoint_sequential, model, policy)


def measure(policy: str, depth: int, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(CountedBlock(SIZE) for _ in range(depth))).to(device)
    x = torch.randn(BATCH, SIZE.context, SIZE.width, device=device, requires_grad=True)
    run = run_with(policy, model)

    def loss() -> Tensor:
        return run(x).sum()

    def step() -> None:
        loss().backward()

    step()  # makes the gradients, so that they do not count, and measures the stages for "optimal"
    for block in model:
        block.calls = 0
    step()
    calls = [block.calls for block in model]
    gc.collect()
    return {
        "held_bytes": held_bytes(loss, device),
        "peak_bytes": peak_bytes(step, device),
        "forwards_again": sum(calls) - depth,
    }


def draw(cases: Sequence[dict[str, Any]], device: str, out: Path) -> None:
    """Memory on the left, recomputed work on the right, both against depth."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    depths = [case["depth"] for case in cases]
    figure, (memory, work) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for policy, (colour, label) in POLICIES.items():
        found = [case["variants"][policy] for case in cases]
        peak = [figures["peak_bytes"] / 1e6 for figures in found]
        held = [figures["held_bytes"] / 1e6 for figures in found]
        again = [f["forwards_again"] / depth for f, depth in zip(found, depths, strict=True)]
        memory.plot(depths, peak, color=colour, marker="o", ms=4, label=label)
        memory.plot(depths, held, color=colour, ls=":", lw=1.2)
        work.plot(depths, again, color=colour, marker="o", ms=4)
    memory.set_yscale("log")
    memory.yaxis.set_major_formatter("{x:g}")
    memory.set_ylabel("MB beyond weights, gradients and input")
    memory.set_title("Activation memory of one training step", loc="left", fontsize=10)
    work.set_ylim(-0.03, 1.08)
    work.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
    work.set_ylabel("blocks that backward ran again")
    work.set_title("Recomputed work", loc="left", fontsize=10)
    for axes in (memory, work):
        axes.set_xscale("log", base=2)
        axes.set_xticks(depths, [str(depth) for depth in depths])
        axes.minorticks_off()
        axes.set_xlabel("depth L (transformer blocks)")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    styles = [
        Line2D([], [], color="black", marker="o", ms=4, label="peak"),
        Line2D([], [], color="black", ls=":", lw=1.2, label="held after forward"),
    ]
    memory.add_artist(memory.legend(handles=styles, fontsize=8, loc="lower right"))
    figure.legend(loc="outside lower center", ncols=len(POLICIES), fontsize=8)
    figure.suptitle(
        f"width {SIZE.width}, {SIZE.heads} heads, {BATCH} x {SIZE.context} tokens, float32, "
        f"{device}, torch {torch.__version__}",
        fontsize=8,
        x=0.01,
        ha="left",
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{OP}")
    add = parser.add_argument
    add("--device", default="cpu", choices=("cpu", "cuda"), help="default: cpu")
    add("--depths", type=int, nargs="+", metavar="L", help=f"default: {DEPTHS}")
    add("--quick", action="store_true", help="depths up to 16: a check, not a result")
    add("--out", type=Path, help=f"JSON file; default: benchmarks/results/DEVICE_{OP}.json")
    args = parser.parse_args(argv)
    if args.depths is None:
        args.depths = [depth for depth in DEPTHS if depth <= 16 or not args.quick]
    if min(args.depths) < 1:
        parser.error(f"--depths must be at least 1, got {min(args.depths)}")
    args.out = args.out or RESULTS / f"{args.device}_{OP}.json"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 if there is no such device."""
    args = parse(argv)
    if not has_device(OP, args.device):
        return 2
    torch.set_num_threads(1)  # the scratch memory of a kernel may depend on it
    device = torch.device(args.device)
    settings = {
        "width": SIZE.width,
        "heads": SIZE.heads,
        "tokens": SIZE.context,
        "batch": BATCH,
        "dtype": "float32",
        "threads": 1,
    }
    results = record.begin(args.out, OP, {}, settings, argv, device)
    for depth in args.depths:
        variants = {policy: measure(policy, depth, device) for policy in POLICIES}
        case = {"op": OP, "depth": depth, "device": args.device, "variants": variants}
        results.add(f"{OP}/{depth}/{args.device}", case)
        words = [
            f"{policy} {found['peak_bytes'] / 1e6:.1f} MB, {found['forwards_again']} again"
            for policy, found in variants.items()
        ]
        print(f"{depth} blocks: {'; '.join(words)}", flush=True)
    figure = args.out.with_suffix(".png")
    draw(list(results.cases.values()), args.device, figure)
    print(f"{os.path.relpath(args.out)}\n{os.path.relpath(figure)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
