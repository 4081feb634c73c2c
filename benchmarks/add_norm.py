"""add_layer_norm and add_rms_norm against an addition and PyTorch's norm.

All directions go through autograd and the public functions, as in a pre-LN block: both outputs are
used, so both have a gradient. `backward` is the backward pass of a graph that is kept.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import memopt
from benchmarks import peers, runner
from benchmarks.harness import Case, Variant
from benchmarks.inputs import EPS, affine_parameters, in_direction_of_graphs, random_matrix

GOALS = {"forward+backward": 1.3}

Function = Callable[..., tuple[Tensor, Tensor]]


def eager_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.layer_norm(total, weight.shape, weight, bias, EPS), total


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    return memopt.functional.add_layer_norm(x, residual, weight.shape, weight, bias, EPS)


def eager_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, EPS), total


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return memopt.functional.add_rms_norm(x, residual, weight.shape, weight, EPS)


OPS: dict[str, tuple[Function, Function]] = {
    "add_layer_norm": (eager_add_layer_norm, add_layer_norm),
    "add_rms_norm": (eager_add_rms_norm, add_rms_norm),
}


def build(
    op: str,
    direction: str,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    device: str,
    peer_names: tuple[str, ...],
) -> list[Variant]:
    x, residual = (random_matrix(rows, cols, dtype, device, s).requires_grad_() for s in (0, 3))
    parameters = affine_parameters(cols, dtype, device)[: 2 if op == "add_layer_norm" else 1]
    grads = [random_matrix(rows, cols, dtype, device, seed) for seed in (1, 4)]
    inputs = (x, residual, *parameters)
    eager, ours = OPS[op]
    functions = {"aten": eager, "memopt": ours}
    # Compiling costs time: only where it is used.
    compiled = peers.compiled(peer_names, eager) if direction == "forward+backward" else {}
    return in_direction_of_graphs(direction, functions, compiled, inputs, parameters, grads)


def ideal_bytes(direction: str, rows: int, cols: int, dtype: torch.dtype) -> int:
    """x and residual in, output and sum out; two gradients and the sum in, one gradient out. The
    statistics and parameters are negligible.
    """
    matrices = {"forward": 4, "backward": 4, "forward+backward": 8}[direction]
    return matrices * rows * cols * dtype.itemsize


def make_cases(args: argparse.Namespace) -> Iterator[Case]:
    for op in OPS:
        yield from runner.all_cases(op, functools.partial(build, op), ideal_bytes, args)


if __name__ == "__main__":
    sys.exit(runner.main("add_norm", make_cases, GOALS))
