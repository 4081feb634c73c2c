"""Dropout against ATen's at p = 0.1: forward, backward, and both; and behind GELU, and in front of
a residual and a norm, against PyTorch's ops one after the other.

ATen's CPU generator draws one number after the other on one thread and its backward reads a mask;
memopt computes the mask twice and reads none. Forward and backward alone call the dispatcher ops
below autograd; forward+backward goes through the public functions and autograd, and so does all of
the fused ops. Their `backward` is the backward pass of a graph that is kept.
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
from benchmarks.inputs import (
    EPS,
    affine_parameters,
    in_direction_of_graphs,
    random_matrix,
    through_autograd,
)

P = 0.1
GOALS = {"forward": 1.5, "forward+backward": 1.5}


def forward_variants(x: Tensor) -> list[Variant]:
    aten, ours = torch.ops.aten.native_dropout, torch.ops.memopt._dropout_forward
    return [
        Variant("aten", lambda: aten(x, P, True)),
        Variant("memopt", lambda: ours(x, P)),
    ]


def backward_variants(x: Tensor, grad: Tensor) -> list[Variant]:
    aten, ours = torch.ops.aten.native_dropout_backward, torch.ops.memopt._dropout_backward
    _, mask = torch.ops.aten.native_dropout(x, P, True)
    _, state = torch.ops.memopt._dropout_forward(x, P)
    return [
        Variant("aten", lambda: aten(grad, mask, 1 / (1 - P)), extra_bytes=mask.nbytes),
        Variant("memopt", lambda: ours(grad, state, P)),
    ]


def training_variants(x: Tensor, grad: Tensor, peer_names: tuple[str, ...]) -> list[Variant]:
    def aten(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, P)

    def ours(x: Tensor) -> Tensor:
        return memopt.functional.dropout(x, P)

    compiled = peers.compiled(peer_names, aten)
    return through_autograd({"aten": aten, "memopt": ours}, compiled, x, (), grad)


def build(
    direction: str,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    device: str,
    peer_names: tuple[str, ...],
) -> list[Variant]:
    x = random_matrix(rows, cols, dtype, device, seed=0)
    if direction == "forward":
        return forward_variants(x)
    grad = random_matrix(rows, cols, dtype, device, seed=1)
    if direction == "backward":
        return backward_variants(x, grad)
    return training_variants(x, grad, peer_names)


def ideal_bytes(direction: str, rows: int, cols: int, dtype: torch.dtype) -> int:
    """x in, y out; dy in, dx out."""
    matrices = {"forward": 2, "backward": 2, "forward+backward": 4}[direction]
    return matrices * rows * cols * dtype.itemsize


def eager_gelu_dropout(x: Tensor) -> tuple[Tensor]:
    return (F.dropout(F.gelu(x), P),)


def gelu_dropout(x: Tensor) -> tuple[Tensor]:
    return (memopt.functional.gelu_dropout(x, P),)


def eager_dropout_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    total = F.dropout(x, P) + residual
    return F.layer_norm(total, weight.shape, weight, bias, EPS), total


def dropout_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    return memopt.functional.dropout_add_layer_norm(x, residual, P, weight.shape, weight, bias, EPS)


Function = Callable[..., tuple[Tensor, ...]]
FUSED: dict[str, tuple[Function, Function]] = {
    "gelu_dropout": (eager_gelu_dropout, gelu_dropout),
    "dropout_add_layer_norm": (eager_dropout_add_layer_norm, dropout_add_layer_norm),
}


def build_fused(
    op: str,
    direction: str,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    device: str,
    peer_names: tuple[str, ...],
) -> list[Variant]:
    adds = op == "dropout_add_layer_norm"
    matrices = [
        random_matrix(rows, cols, dtype, device, seed) for seed in ((0, 3) if adds else (0,))
    ]
    parameters = affine_parameters(cols, dtype, device) if adds else ()
    inputs = (*(matrix.requires_grad_() for matrix in matrices), *parameters)
    grads = [random_matrix(rows, cols, dtype, device, seed) for seed in ((1, 4) if adds else (1,))]
    eager, ours = FUSED[op]
    functions = {"aten": eager, "memopt": ours}
    # Compiling costs time: only where it is used.
    compiled = peers.compiled(peer_names, eager) if direction == "forward+backward" else {}
    return in_direction_of_graphs(direction, functions, compiled, inputs, parameters, grads)


def ideal_bytes_fused(op: str, direction: str, rows: int, cols: int, dtype: torch.dtype) -> int:
    """Of gelu_dropout as of GELU: x in, y out; dy and x in, dx out. Of dropout_add_layer_norm: x
    and residual in, output and sum out; two gradients and the sum in, two gradients out.
    """
    matrices = {
        "gelu_dropout": {"forward": 2, "backward": 3, "forward+backward": 5},
        "dropout_add_layer_norm": {"forward": 4, "backward": 5, "forward+backward": 9},
    }[op][direction]
    return matrices * rows * cols * dtype.itemsize


def make_cases(args: argparse.Namespace) -> Iterator[Case]:
    yield from runner.all_cases("dropout", build, ideal_bytes, args)
    for op in FUSED:
        yield from runner.all_cases(
            op,
            functools.partial(build_fused, op),
            functools.partial(ideal_bytes_fused, op),
            args,
        )


if __name__ == "__main__":
    sys.exit(runner.main("dropout", make_cases, GOALS))
