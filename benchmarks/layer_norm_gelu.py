"""GELU(LayerNorm(x)) as one op against ATen's pair: forward (with the statistics), backward, and
both.

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
from benchmarks import layer_norm, peers, runner
from benchmarks.harness import Variant
from benchmarks.inputs import EPS, affine_parameters, random_matrix, through_autograd

GOALS = {"forward+backward": 1.6}


def _named(approximate: str) -> dict[str, str]:
    """Of the private ops."""
    return {"norm": "layer_norm", "activation": "gelu_tanh" if approximate == "tanh" else "gelu"}


def forward_variants(x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> list[Variant]:
    shape = list(weight.shape)
    weight, bias = weight.detach(), bias.detach()
    ours = functools.partial(
        torch.ops.memopt._norm_forward,
        x, None, 1, weight, bias, EPS,
        **_named(approximate),
    )  # fmt: skip

    def aten() -> object:
        z, mean, rstd = torch.ops.aten.native_layer_norm(x, shape, weight, bias, EPS)
        return torch.ops.aten.gelu(z, approximate=approximate), z, mean, rstd  # backward needs z

    return [
        Variant("aten", aten),
        Variant("memopt", ours),
    ]


def backward_variants(
    x: Tensor, grad: Tensor, weight: Tensor, bias: Tensor, approximate: str
) -> list[Variant]:
    shape = list(weight.shape)
    weight, bias = weight.detach(), bias.detach()
    z, aten_mean, aten_rstd = torch.ops.aten.native_layer_norm(x, shape, weight, bias, EPS)
    _, _, mean, rstd = torch.ops.memopt._norm_forward(
        x, None, 1, weight, bias, EPS, **_named(approximate)
    )
    everything = [True, True, True]

    def aten() -> object:
        dz = torch.ops.aten.gelu_backward(grad, z, approximate=approximate)
        return torch.ops.aten.native_layer_norm_backward(
            dz, x, shape, aten_mean, aten_rstd, weight, bias, everything
        )

    ours = functools.partial(
        torch.ops.memopt._norm_backward,
        grad, None, x, 1, mean, rstd, weight, bias, everything,
        **_named(approximate),
    )  # fmt: skip
    return [
        Variant("aten", aten),
        Variant("memopt", ours),
        Variant("memopt+y", functools.partial(ours, recompute_output=True), extra_bytes=x.nbytes),
    ]


def training_variants(
    x: Tensor,
    grad: Tensor,
    weight: Tensor,
    bias: Tensor,
    approximate: str,
    peer_names: tuple[str, ...],
) -> list[Variant]:
    def aten(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        z = torch.nn.functional.layer_norm(x, weight.shape, weight, bias, EPS)
        return torch.nn.functional.gelu(z, approximate=approximate)

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return memopt.functional.layer_norm_gelu(
            x, weight.shape, weight, bias, EPS, approximate=approximate
        )

    compiled = peers.compiled(peer_names, aten)
    return through_autograd({"aten": aten, "memopt": ours}, compiled, x, (weight, bias), grad)


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
    weight, bias = affine_parameters(cols, dtype, device)
    if direction == "forward":
        return forward_variants(x, weight, bias, approximate)
    grad = random_matrix(rows, cols, dtype, device, seed=1)
    if direction == "backward":
        return backward_variants(x, grad, weight, bias, approximate)
    return training_variants(x, grad, weight, bias, approximate, peer_names)


# The same tensors come and go as in layer_norm.
make_cases = functools.partial(runner.all_cases, "layer_norm_gelu", build, layer_norm.ideal_bytes)


if __name__ == "__main__":
    sys.exit(runner.main("layer_norm_gelu", make_cases, GOALS))
