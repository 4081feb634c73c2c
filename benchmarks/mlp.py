"""Whole MLPs (norm, first linear or linears, activation or gated unit, last linear, residual) at
each level of recomputation against the eager composition, forward and backward together.

`rows x cols` is the input; GPT-2's MLP is 4 cols wide with biases, Llama's 8/3 cols without.
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
    linear_parameters,
    random_matrix,
    through_autograd,
)

GOALS = {"forward+backward": 1.0}
LEVELS = {"memopt": "activations", "memopt, none": "none", "memopt, all": "all"}

Function = Callable[..., Tensor]


def eager_gpt2(x: Tensor, gamma: Tensor, beta: Tensor, *linears: Tensor) -> Tensor:
    up, up_bias, down, down_bias = linears
    n = F.layer_norm(x, gamma.shape, gamma, beta, EPS)
    return F.linear(F.gelu(F.linear(n, up, up_bias), approximate="tanh"), down, down_bias) + x


def gpt2(level: str, x: Tensor, gamma: Tensor, beta: Tensor, *linears: Tensor) -> Tensor:
    return memopt.functional.mlp(
        x,
        *linears,
        activation="gelu_tanh",
        norm="layer_norm",
        norm_weight=gamma,
        norm_bias=beta,
        eps=EPS,
        residual=True,
        recompute=level,
    )


def eager_llama(x: Tensor, gamma: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    n = F.rms_norm(x, gamma.shape, gamma, EPS)
    return F.linear(F.silu(F.linear(n, gate)) * F.linear(n, up), down) + x


def llama(level: str, x: Tensor, gamma: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return memopt.functional.mlp(
        x,
        up,
        None,
        down,
        gate_weight=gate,
        activation="silu",
        norm="rms_norm",
        norm_weight=gamma,
        eps=EPS,
        residual=True,
        recompute=level,
    )


def gpt2_parameters(cols: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    return (
        *affine_parameters(cols, dtype, device),
        *linear_parameters(cols, 4 * cols, dtype, device),
        *linear_parameters(4 * cols, cols, dtype, device),
    )


def llama_parameters(cols: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    hidden = llama_width(cols)
    sizes = ((cols, hidden), (cols, hidden), (hidden, cols))
    weights = [linear_parameters(*size, dtype, device)[0] for size in sizes]
    return (affine_parameters(cols, dtype, device)[0], *weights)


def llama_width(cols: int) -> int:
    """8/3 cols, a multiple of 128."""
    return round(8 * cols / 3 / 128) * 128


MODELS: dict[str, tuple[Function, Function, Callable[..., tuple[Tensor, ...]]]] = {
    "mlp_gpt2": (eager_gpt2, gpt2, gpt2_parameters),
    "mlp_llama": (eager_llama, llama, llama_parameters),
}


def build(
    name: str,
    direction: str,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    device: str,
    peer_names: tuple[str, ...],
) -> list[Variant]:
    eager, ours, make_parameters = MODELS[name]
    functions = {"aten": eager}
    functions |= {variant: functools.partial(ours, level) for variant, level in LEVELS.items()}
    x = random_matrix(rows, cols, dtype, device, seed=0)
    grad = random_matrix(rows, cols, dtype, device, seed=1)
    parameters = make_parameters(cols, dtype, device)
    return through_autograd(functions, peers.compiled(peer_names, eager), x, parameters, grad)


def ideal_bytes(name: str, direction: str, rows: int, cols: int, dtype: torch.dtype) -> int:
    """Activations in and out of each product and each kernel between, weights once in each product:
    of the level that writes activations again. Far below what the products' arithmetic takes.
    """
    hidden, first = (4 * cols, 1) if name == "mlp_gpt2" else (llama_width(cols), 2)
    weights = (first + 1) * hidden * cols
    forward = rows * (4 * cols + (2 * first + 2) * hidden) + weights
    backward = rows * (8 * cols + (5 * first + 4) * hidden) + 2 * weights
    return (forward + backward) * dtype.itemsize


def make_cases(args: argparse.Namespace) -> Iterator[Case]:
    args.direction = ("forward+backward",)
    for name in MODELS:
        yield from runner.all_cases(
            name, functools.partial(build, name), functools.partial(ideal_bytes, name), args
        )


if __name__ == "__main__":
    sys.exit(runner.main("mlp", make_cases, GOALS))
