"""Proves: float32 kernels are as accurate as PyTorch's, to the unit in the last place, in every
instruction set: the logistic functions over the whole range of negative inputs, and the norms'
weight gradients, which are sums over many rows.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memopt
from tests.support.forks import run_in_forks

from .test_cpu_capability import RUNNABLE

# Prints the largest error of each, memopt's and PyTorch's, in units in the last place of the exact
# result.
ULP_PROGRAM = """
import torch, memopt
from memopt import functional as ours
from torch.nn import functional as theirs

# Down to where exp(-x) overflows and the results are subnormal.
inputs = [-torch.logspace(-6, 1.94, 500_001, dtype=torch.float64).float()]
inputs += [-torch.linspace(0.5, 87, 500_001), torch.linspace(0, 30, 100_001)]
x = torch.cat(inputs)
up = torch.linspace(1, 2, x.numel())

def gradient(f):
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(f(leaf), leaf, torch.ones_like(x))[0]

def ulps(result, exact):
    exponent = torch.frexp(exact.abs().clamp_min(2.0 ** -126))[1].double()
    return ((result.double() - exact).abs() / torch.exp2(exponent - 24)).max().item()

d = x.double()
s = torch.sigmoid(d)
for name, mine, reference, exact in (
    ("sigmoid", ours.sigmoid(x), torch.sigmoid(x), s),
    ("silu", ours.silu(x), theirs.silu(x), d * s),
    ("swiglu", ours.swiglu(x, up), theirs.silu(x) * up, d * s * up.double()),
    ("sigmoid_grad", gradient(ours.sigmoid), gradient(torch.sigmoid), s * torch.sigmoid(-d)),
):
    print(name, ulps(mine, exact), ulps(reference, exact))
"""


@pytest.mark.slow
def test_logistic_functions_to_the_last_place(child_environment: dict[str, str]) -> None:
    settings = [{"MEMOPT_CPU_CAPABILITY": capability} for capability in RUNNABLE]
    printed = run_in_forks(ULP_PROGRAM, settings, child_environment)
    for capability, text in zip(RUNNABLE, printed, strict=True):
        lines = text.splitlines()
        assert len(lines) == 4
        for name, ours, theirs in map(str.split, lines):
            assert float(ours) <= 1.02 * float(theirs), (
                f"{name}, {capability}: {ours} ulp, PyTorch's has {theirs}"
            )


def weight_gradient(norm, x: Tensor, dy: Tensor) -> Tensor:
    weight = torch.ones(x.shape[-1], dtype=x.dtype, requires_grad=True)
    (gradient,) = torch.autograd.grad(norm(x, weight), weight, dy)
    return gradient


@pytest.mark.parametrize("rows", [100, 2000, 16384, 65536])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_weight_gradients_over_many_rows(norm: str, rows: int) -> None:
    """The root mean square of the error over all columns against PyTorch's, over some draws.

    One draw's ratio scatters by 5 percent over 512 columns and by 13 over 64, their mean by 2 and
    5: many rows have the smaller ratio by far, and make do with few columns.
    """
    cols = 512 if rows <= 2000 else 64
    ours = lambda x, w: getattr(memopt.functional, norm)(x, (cols,), w)  # noqa: E731
    theirs = lambda x, w: getattr(F, norm)(x, (cols,), w)  # noqa: E731
    ratios = []
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, cols, generator=generator) * 2 + 0.5
        dy = torch.randn(rows, cols, generator=generator)
        exact = weight_gradient(theirs, x.double(), dy.double())
        mine, reference = (
            (weight_gradient(f, x, dy).double() - exact).square().mean().sqrt().item()
            for f in (ours, theirs)
        )
        ratios.append(math.log(mine / reference))
    assert math.exp(sum(ratios) / len(ratios)) <= 1.1
