"""The ops with a Linear in them: layer_norm_linear, gelu_linear, and whole MLPs.

The matrix products, which are the same for all variants, take most of the time.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

import memopt
from benchmarks.inputs import EPS, affine_parameters, linear_parameters
from benchmarks.op import Op

ours = memopt.functional
LEVELS = {"memopt": "activations", "memopt, none": "none", "memopt, all": "all"}
"""Levels of recomputation: what an MLP writes again."""


def layer_norm_linear() -> Op:
    """rows x cols in; the Linear is that of query, key and value, from cols to 3 cols."""

    def eager(x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(F.layer_norm(x, gamma.shape, gamma, beta, EPS), weight, bias)

    def parameters(cols: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
        affine = affine_parameters(cols, dtype, device)
        return (*affine, *linear_parameters(cols, 3 * cols, dtype, device))

    def elements(rows: int, cols: int) -> tuple[int, int]:
        """Activations, and the weight once in each product: x and W in, y out; dy, x and W in, dx
        and dW out.
        """
        return 4 * rows * cols + 3 * cols * cols, 5 * rows * cols + 6 * cols * cols

    return Op(
        eager,
        lambda *inputs: ours.layer_norm_linear(*inputs, EPS),
        elements,
        outputs=(3,),
        parameters=parameters,
    )


def gelu_linear(form: str) -> Op:
    """rows x 4 cols in; the Linear is the second one of an MLP, from 4 cols to cols."""

    def elements(rows: int, cols: int) -> tuple[int, int]:
        """Counts as for layer_norm_linear."""
        return 5 * rows * cols + 4 * cols * cols, 9 * rows * cols + 8 * cols * cols

    return Op(
        lambda x, weight, bias: F.linear(F.gelu(x, approximate=form), weight, bias),
        lambda x, weight, bias: ours.gelu_linear(x, weight, bias, form),
        elements,
        widths=(4,),
        parameters=lambda cols, dtype, device: linear_parameters(4 * cols, cols, dtype, device),
    )


def mlp_gpt2() -> Op:
    """Norm, Linear, GELU, Linear, residual; 4 cols wide, with biases."""

    def eager(x: Tensor, gamma: Tensor, beta: Tensor, *linears: Tensor) -> Tensor:
        up, up_bias, down, down_bias = linears
        n = F.layer_norm(x, gamma.shape, gamma, beta, EPS)
        return F.linear(F.gelu(F.linear(n, up, up_bias), approximate="tanh"), down, down_bias) + x

    def fused(level: str, x: Tensor, gamma: Tensor, beta: Tensor, *linears: Tensor) -> Tensor:
        norm = {"norm": "layer_norm", "norm_weight": gamma, "norm_bias": beta, "eps": EPS}
        return ours.mlp(x, *linears, activation="gelu_tanh", **norm, residual=True, recompute=level)

    def parameters(cols: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
        return (
            *affine_parameters(cols, dtype, device),
            *linear_parameters(cols, 4 * cols, dtype, device),
            *linear_parameters(4 * cols, cols, dtype, device),
        )

    levels = {name: functools.partial(fused, level) for name, level in LEVELS.items()}
    return Op(
        eager,
        levels.pop("memopt"),
        lambda rows, cols: _elements(rows, cols, 4 * cols, first=1),
        parameters=parameters,
        others=levels,
    )


def mlp_llama() -> Op:
    """Norm, two Linears, their gated unit, Linear, residual; 8/3 cols wide, without biases."""

    def eager(x: Tensor, gamma: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        n = F.rms_norm(x, gamma.shape, gamma, EPS)
        return F.linear(F.silu(F.linear(n, gate)) * F.linear(n, up), down) + x

    def fused(
        level: str, x: Tensor, gamma: Tensor, gate: Tensor, up: Tensor, down: Tensor
    ) -> Tensor:
        norm = {"norm": "rms_norm", "norm_weight": gamma, "eps": EPS}
        unit = {"gate_weight": gate, "activation": "silu"}
        return ours.mlp(x, up, None, down, **unit, **norm, residual=True, recompute=level)

    def parameters(cols: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
        hidden = llama_width(cols)
        sizes = ((cols, hidden), (cols, hidden), (hidden, cols))
        weights = [linear_parameters(*size, dtype, device)[0] for size in sizes]
        return (affine_parameters(cols, dtype, device)[0], *weights)

    levels = {name: functools.partial(fused, level) for name, level in LEVELS.items()}
    return Op(
        eager,
        levels.pop("memopt"),
        lambda rows, cols: _elements(rows, cols, llama_width(cols), first=2),
        parameters=parameters,
        others=levels,
    )


def llama_width(cols: int) -> int:
    """8/3 cols, a multiple of 128."""
    return round(8 * cols / 3 / 128) * 128


def _elements(rows: int, cols: int, hidden: int, first: int) -> tuple[int, int]:
    """Activations in and out of each product and each kernel between, weights once in each product:
    of the level that writes activations again. Far below what the products' arithmetic takes.
    """
    weights = (first + 1) * hidden * cols
    forward = rows * (4 * cols + (2 * first + 2) * hidden) + weights
    backward = rows * (8 * cols + (5 * first + 4) * hidden) + 2 * weights
    return forward, backward
