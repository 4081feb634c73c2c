"""RMSNorm against PyTorch's: forward (with the statistics), backward (both gradients), and both.

PyTorch's op saves and computes differently on each device (on the CPU it is made of single ops), so
all three directions go through autograd and the public functions: `backward` is the backward pass
of a graph that is kept. `memopt+y` is the dispatcher op that also writes the op's output again.
"""

from __future__ import annotations

import functools
import sys

import torch
from torch import Tensor

import memopt
from benchmarks import peers, runner
from benchmarks.harness import Variant
from benchmarks.inputs import EPS, affine_parameters, random_matrix, through_autograd

GOALS = {"forward": 1.0, "backward": 1.3, "forward+backward": 1.3}


def aten(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)


def ours(x: Tensor, weight: Tensor) -> Tensor:
    return memopt.functional.rms_norm(x, weight.shape, weight, EPS)


def forward_variants(x: Tensor, weight: Tensor) -> list[Variant]:
    x = x.requires_grad_()
    return [
        Variant("aten", lambda: aten(x, weight)),
        Variant("memopt", lambda: ours(x, weight)),
    ]


def backward_variants(x: Tensor, grad: Tensor, weight: Tensor) -> list[Variant]:
    x = x.requires_grad_()

    def variant(name: str, output: Tensor) -> Variant:
        return Variant(
            name, lambda: torch.autograd.grad(output, (x, weight), grad, retain_graph=True)
        )

    plain, w = x.detach(), weight.detach()
    _, _, _, rstd = torch.ops.memopt._norm_forward(plain, None, 1, w, None, EPS, norm="rms_norm")
    backward = functools.partial(
        torch.ops.memopt._norm_backward,
        grad, None, plain, 1, None, rstd, w, None, [True, True, False], True,
        norm="rms_norm",
    )  # fmt: skip
    return [
        variant("aten", aten(x, weight)),
        variant("memopt", ours(x, weight)),
        Variant("memopt+y", backward, extra_bytes=x.nbytes),
    ]


def build(
    direction: str,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    device: str,
    peer_names: tuple[str, ...],
) -> list[Variant]:
    x = random_matrix(rows, cols, dtype, device, seed=0)
    weight, _ = affine_parameters(cols, dtype, device)
    if direction == "forward":
        return forward_variants(x, weight)
    grad = random_matrix(rows, cols, dtype, device, seed=1)
    if direction == "backward":
        return backward_variants(x, grad, weight)
    others = {**peers.compiled(peer_names, aten), **peers.rms_norms(peer_names)}
    return through_autograd({"aten": aten, "memopt": ours}, others, x, (weight,), grad)


def ideal_bytes(direction: str, rows: int, cols: int, dtype: torch.dtype) -> int:
    """x in, y out; dy and x in, dx out; and the float32 rstd of each row. The weight is
    negligible.
    """
    matrices = {"forward": 2, "backward": 3, "forward+backward": 5}[direction]
    statistics = 2 if direction == "forward+backward" else 1
    return matrices * rows * cols * dtype.itemsize + statistics * 4 * rows


make_cases = functools.partial(runner.all_cases, "rms_norm", build, ideal_bytes)


if __name__ == "__main__":
    sys.exit(runner.main("rms_norm", make_cases, GOALS))
