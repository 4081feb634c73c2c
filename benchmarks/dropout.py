"""Dropout against ATen's at p = 0.1: forward, backward, and both.

ATen's CPU generator draws one number after the other on one thread and its backward reads a mask;
memopt computes the mask twice and reads none. Forward and backward alone call the dispatcher ops
below autograd; forward+backward goes through the public functions and autograd.
"""

from __future__ import annotations

import functools
import sys

import torch
from torch import Tensor

import memopt
from benchmarks import peers, runner
from benchmarks.harness import Variant
from benchmarks.inputs import random_matrix, through_autograd

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


make_cases = functools.partial(runner.all_cases, "dropout", build, ideal_bytes)


if __name__ == "__main__":
    sys.exit(runner.main("dropout", make_cases, GOALS))
