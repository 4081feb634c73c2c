"""LayerNorm against ATen's: forward (with the statistics), backward (all three gradients), and
both.

Forward and backward alone call the dispatcher ops below autograd, so no graph is timed;
forward+backward goes through the public functions and autograd, as training does. `memopt+y` is the
backward that also writes the op's output again; what ATen has to compare with is its backward
alone, which keeps that output stored instead.
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

GOALS = {"forward": 1.0, "backward": 1.3}


def forward_variants(x: Tensor, weight: Tensor, bias: Tensor) -> list[Variant]:
    shape = list(weight.shape)
    weight, bias = weight.detach(), bias.detach()
    aten, ours = torch.ops.aten.native_layer_norm, torch.ops.memopt._norm_forward
    return [
        Variant("aten", lambda: aten(x, shape, weight, bias, EPS)),
        Variant("memopt", lambda: ours(x, None, 1, weight, bias, EPS, norm="layer_norm")),
    ]


def backward_variants(x: Tensor, grad: Tensor, weight: Tensor, bias: Tensor) -> list[Variant]:
    shape = list(weight.shape)
    weight, bias = weight.detach(), bias.detach()
    _, aten_mean, aten_rstd = torch.ops.aten.native_layer_norm(x, shape, weight, bias, EPS)
    _, _, mean, rstd = torch.ops.memopt._norm_forward(
        x, None, 1, weight, bias, EPS, norm="layer_norm"
    )
    aten = torch.ops.aten.native_layer_norm_backward
    everything = [True, True, True]
    ours = functools.partial(
        torch.ops.memopt._norm_backward,
        grad, None, x, 1, mean, rstd, weight, bias, everything,
        norm="layer_norm",
    )  # fmt: skip
    return [
        Variant(
            "aten", lambda: aten(grad, x, shape, aten_mean, aten_rstd, weight, bias, everything)
        ),
        Variant("memopt", ours),
        Variant("memopt+y", functools.partial(ours, recompute_output=True), extra_bytes=x.nbytes),
    ]


def training_variants(
    x: Tensor, grad: Tensor, weight: Tensor, bias: Tensor, peer_names: tuple[str, ...]
) -> list[Variant]:
    def aten(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, EPS)

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return memopt.functional.layer_norm(x, weight.shape, weight, bias, EPS)

    others = {**peers.compiled(peer_names, aten), **peers.layer_norms(peer_names)}
    return through_autograd({"aten": aten, "memopt": ours}, others, x, (weight, bias), grad)


def build(
    direction: str,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    device: str,
    peer_names: tuple[str, ...],
) -> list[Variant]:
    x = random_matrix(rows, cols, dtype, device, seed=0)
    weight, bias = affine_parameters(cols, dtype, device)
    if direction == "forward":
        return forward_variants(x, weight, bias)
    grad = random_matrix(rows, cols, dtype, device, seed=1)
    if direction == "backward":
        return backward_variants(x, grad, weight, bias)
    return training_variants(x, grad, weight, bias, peer_names)


def ideal_bytes(direction: str, rows: int, cols: int, dtype: torch.dtype) -> int:
    """x in, y out; dy and x in, dx out; and the float32 mean and rstd of each row. The parameters
    are negligible.
    """
    matrices = {"forward": 2, "backward": 3, "forward+backward": 5}[direction]
    statistics = 2 if direction == "forward+backward" else 1
    return matrices * rows * cols * dtype.itemsize + statistics * 8 * rows


make_cases = functools.partial(runner.all_cases, "layer_norm", build, ideal_bytes)


if __name__ == "__main__":
    sys.exit(runner.main("layer_norm", make_cases, GOALS))
