"""Norms over channels, alone and with the activation that stands behind them in convolutional and
diffusion networks, beside PyTorch's: forward and backward as training runs them.

Group norm of 32 groups, with SiLU behind; batch norm in training, with ReLU behind. Sizes are those
of ResNet-50's layers and of a U-Net's (N, C, H, W), in both orders in memory, float32 and bfloat16
(parameters and running statistics likewise). On the CPU on one thread. A step is one call of the
function, or of the norm's and the activation's where PyTorch has two, and its backward to all
gradients. Times are taken in turns as in harness.py; `over_eager` is of the same round.

`python -m benchmarks.channel_norm [--device cuda] [--quick] [--filter NAME] [--out FILE.json]`
writes the JSON and prints the table.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import record
from benchmarks.cli import has_device, in_time, parse_ways
from benchmarks.clocks import StepClock, keep_freed_memory
from benchmarks.harness import Effort, compared, effort_of
from benchmarks.inputs import EPS, affine_parameters, random_matrix
from benchmarks.model_ways import EAGER
from benchmarks.summary import describe, geometric_mean, table
from memopt import functional as ours

OP = "channel_norm"
FULL = Effort(rounds=11, min_rounds=5, case_seconds=1.5, sample_seconds=0.02)
CUDA_EFFORT = Effort(rounds=15, min_rounds=5, case_seconds=1.0, sample_seconds=0.05)
THREADS = 1
GROUPS = 32
Size = tuple[int, int, int, int]
SIZES: tuple[Size, ...] = (
    (8, 64, 56, 56),
    (64, 256, 14, 14),
    (32, 512, 7, 7),
    (4, 128, 64, 64),
    (2, 320, 32, 32),
    (16, 1280, 8, 8),
)
LAYOUTS = {"planes": torch.contiguous_format, "channels last": torch.channels_last}
DTYPES = (torch.float32, torch.bfloat16)
GOALS = {"group_norm": 1.2, "group_norm, silu": 1.5, "batch_norm": 1.0, "batch_norm, relu": 1.0}
"""PyTorch's time over memopt's, as it is aimed at on the CPU."""

Function = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Takes input, weight, bias, running mean and running variance."""


def torch_group_norm(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return F.group_norm(x, GROUPS, w, b, EPS)


def torch_batch_norm(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return F.batch_norm(x, mean, var, w, b, training=True, eps=EPS)


def our_group_norm(activation: str | None) -> Function:
    return lambda x, w, b, mean, var: ours.group_norm(x, GROUPS, w, b, EPS, activation)


def our_batch_norm(activation: str | None) -> Function:
    return lambda x, w, b, mean, var: ours.batch_norm(
        x, mean, var, w, b, training=True, eps=EPS, activation=activation
    )


OPS: Mapping[str, Mapping[str, Function]] = {
    "group_norm": {EAGER: torch_group_norm, "memopt": our_group_norm(None)},
    "group_norm, silu": {
        EAGER: lambda *tensors: F.silu(torch_group_norm(*tensors)),
        "memopt": our_group_norm("silu"),
    },
    "batch_norm": {EAGER: torch_batch_norm, "memopt": our_batch_norm(None)},
    "batch_norm, relu": {
        EAGER: lambda *tensors: F.relu(torch_batch_norm(*tensors)),
        "memopt": our_batch_norm("relu"),
    },
}


@dataclasses.dataclass(frozen=True)
class NormCase:
    op: str
    size: Size
    layout: str
    dtype: torch.dtype

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.op}, {'x'.join(map(str, self.size))}, {self.layout}, {dtype}"


def all_cases(sizes: Iterable[Size] = SIZES) -> dict[str, NormCase]:
    each = itertools.product(OPS, sizes, LAYOUTS, DTYPES)
    return {case.name: case for case in itertools.starmap(NormCase, each)}


def steps(case: NormCase, device: torch.device) -> dict[str, Callable[[], Any]]:
    """A forward and backward in each way."""
    channels, of = case.size[1], (case.dtype, str(device))

    def images(seed: int) -> Tensor:
        flat = random_matrix(case.size[0], channels * case.size[2] * case.size[3], *of, seed)
        return flat.reshape(case.size).contiguous(memory_format=LAYOUTS[case.layout])

    x, grad = images(0).requires_grad_(), images(1)
    weight, bias = affine_parameters(channels, *of)

    def step(function: Function) -> Callable[[], Any]:
        mean, var = torch.zeros_like(bias).detach(), torch.ones_like(bias).detach()

        def run() -> Any:
            output = function(x, weight, bias, mean, var)
            return torch.autograd.grad(output, (x, weight, bias), grad)

        return run

    return {way: step(function) for way, function in OPS[case.op].items()}


def case_of(case: NormCase, device: torch.device, effort: Effort) -> dict[str, Any]:
    """The record of a case, as it stands in the JSON file."""
    runs = steps(case, device)
    found = compared(
        runs, StepClock(device), effort, EAGER, "over_eager", {way: {} for way in runs}
    )
    dtype = str(case.dtype).removeprefix("torch.")
    return {**found, "op": case.op, "size": case.size, "layout": case.layout, "dtype": dtype}


def speed(case: Mapping[str, Any]) -> float:
    """PyTorch's time over memopt's."""
    return 1 / float(case["variants"]["memopt"]["over_eager"]["median"])


def tables(cases: Iterable[Mapping[str, Any]]) -> str:
    """A row for each op and order in memory: the mean of the ratios, and the least and largest."""
    of: dict[tuple[str, str], dict[str, list[float]]] = {}
    for case in cases:
        row = of.setdefault((case["op"], case["layout"]), {})
        row.setdefault(case["dtype"], []).append(speed(case))
    dtypes = sorted({dtype for row in of.values() for dtype in row}, reverse=True)
    rows = []
    for (op, layout), row in of.items():
        cells = [
            f"**{geometric_mean(found):.2f}x** ({min(found):.2f}x to {max(found):.2f}x)"
            for found in (row.get(dtype, []) for dtype in dtypes)
            if found
        ]
        rows.append([op, layout, f"{GOALS[op]:.1f}x", *cells])
    return table(["op", "order in memory", "goal", *dtypes], rows)


def report(run: Mapping[str, Any]) -> str:
    """The run as Markdown."""
    head = ["# Norms over channels", describe(dict(run))]
    return "\n\n".join([*head, tables(run["cases"].values())])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_ways(OP, argv, devices=("cpu", "cuda"))
    if not has_device(OP, args.device):
        return 2
    device = torch.device(args.device)
    torch.set_num_threads(THREADS)
    on_cuda = device.type == "cuda"
    effort = effort_of(args, FULL, CUDA_EFFORT)
    keeps_memory = not on_cuda and keep_freed_memory()  # as a GPU's allocator does
    settings = {
        **dataclasses.asdict(effort),
        "threads": THREADS,
        "keeps_freed_memory": keeps_memory,
    }
    results = record.begin(args.out, OP, {}, settings, argv, device)
    cases = all_cases(SIZES[:1] if args.quick else SIZES)
    for name, case in in_time(OP, args, cases):
        results.add(name, case_of(case, device, effort))
        print(f"{name}: {speed(results.cases[name]):.2f}x", flush=True)
    print(f"\n{report(results.run)}\n\n{args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
