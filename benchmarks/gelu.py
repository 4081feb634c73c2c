"""GELU against ATen's, both forms: forward, backward, and both.

Forward and backward alone call the dispatcher ops below autograd, so no graph is timed;
forward+backward goes through the public functions and autograd. `memopt+y` is the backward that
also writes the op's output again.
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

GOALS = {"forward": 1.2, "backward": 1.2, "forward+backward": 1.2}


def forward_variants(x: Tensor, approximate: str) -> list[Variant]:
    aten, ours = torch.ops.aten.gelu, memopt.functional.gelu
    return [
        Variant("aten", lambda: aten(x, approximate=approximate)),
        Variant("memopt", lambda: ours(x, approximate=approximate)),
    ]


def backward_variants(x: Tensor, grad: Tensor, approximate: str) -> list[Variant]:
    aten, ours = torch.ops.aten.gelu_backward, torch.ops.memopt._activation_backward
    activation = "gelu_tanh" if approximate == "tanh" else "gelu"
    return [
        Variant("aten", lambda: aten(grad, x, approximate=approximate)),
        Variant("memopt", lambda: ours(grad, x, activation=activation)),
        Variant(
            "memopt+y",
            lambda: ours(grad, x, activation=activation, recompute_output=True),
            extra_bytes=x.nbytes,
        ),
    ]


def training_variants(
    x: Tensor, grad: Tensor, approximate: str, peer_names: tuple[str, ...]
) -> list[Variant]:
    def aten(x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x, approximate=approximate)

    def ours(x: Tensor) -> Tensor:
        return memopt.functional.gelu(x, approximate=approximate)

    compiled = peers.compiled(peer_names, aten)
    return through_autograd({"aten": aten, "memopt": ours}, compiled, x, (), grad)


def build(
    direction: str,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    approximate: str,
    device: str,
    peer_names: tuple[str, ...],
) -> list[Variant]:
    x = random_matrix(rows, cols, dtype, device, seed=0)
    if direction == "forward":
        return forward_variants(x, approximate)
    grad = random_matrix(rows, cols, dtype, device, seed=1)
    if direction == "backward":
        return backward_variants(x, grad, approximate)
    return training_variants(x, grad, approximate, peer_names)


def ideal_bytes(direction: str, rows: int, cols: int, dtype: torch.dtype) -> int:
    """x in, y out; dy and x in, dx out."""
    matrices = {"forward": 2, "backward": 3, "forward+backward": 5}[direction]
    return matrices * rows * cols * dtype.itemsize


make_cases = functools.partial(runner.all_cases, "gelu", build, ideal_bytes)


if __name__ == "__main__":
    sys.exit(runner.main("gelu", make_cases, GOALS))
