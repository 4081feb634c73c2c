"""Proves: float32 kernels are as accurate as PyTorch's, to the unit in the last place, in every
instruction set: the logistic functions over the whole range of negative inputs, and the norms'
weight gradients, which are sums over many rows. What is computed for bfloat16 alone is within a
rounding of the exact result, for every bfloat16 number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

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


def printed(program: str, environment: dict[str, str]) -> Iterator[tuple[str, list[list[str]]]]:
    """In each instruction set the words of each line."""
    settings = [{"MEMOPT_CPU_CAPABILITY": capability} for capability in RUNNABLE]
    texts = run_in_forks(program, settings, environment)
    for capability, text in zip(RUNNABLE, texts, strict=True):
        yield capability, [line.split() for line in text.splitlines()]


@pytest.mark.slow
def test_logistic_functions_to_the_last_place(child_environment: dict[str, str]) -> None:
    for capability, lines in printed(ULP_PROGRAM, child_environment):
        assert len(lines) == 4
        for name, ours, theirs in lines:
            assert float(ours) <= 1.02 * float(theirs), (
                f"{name}, {capability}: {ours} ulp, PyTorch's has {theirs}"
            )


# Prints the largest error of each, in distances of two neighbours, of which rounding takes half.
# Powers of two below the smallest normal float32 may be 0, and GELU's derivative multiplies them by
# up to 2^8: results below 2^-116 are left out.
NEIGHBOURS_PROGRAM = """
import math, torch
from memopt import functional as ours

x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16)
x = x[x.isfinite() & (x.abs() < 2.0 ** 100)]
d = x.double()

def logistic(a, scale=1.0):
    s = torch.sigmoid(a)
    return d * s, s + d * (s * torch.sigmoid(-a)) * scale

u = math.sqrt(2 / math.pi) * (d + 0.044715 * d ** 3)
du = math.sqrt(2 / math.pi) * (1 + 0.134145 * d * d)
cdf = torch.special.erfc(-d / math.sqrt(2)) / 2
for name, exact in (
    ("gelu", (d * cdf, cdf + d * torch.exp(-d * d / 2) / math.sqrt(2 * math.pi))),
    ("gelu_tanh", logistic(2 * u, 2 * du)),
    ("silu", logistic(d)),
    ("quick_gelu", logistic(1.702 * d, 1.702)),
    ("sigmoid", (torch.sigmoid(d), torch.sigmoid(d) * torch.sigmoid(-d))),
):
    leaf = x.clone().requires_grad_()
    y = ours.activation(leaf, name)
    (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    errors = []
    for result, right in zip((y, dx), exact):
        ulp = torch.exp2(torch.frexp(right.abs())[1].double() - 8)
        error = ((result.double() - right).abs() / ulp)[right.abs() >= 2.0 ** -116]
        errors.append(error.max().item())
    print(name, *errors)
"""


def test_short_forms_round_every_bfloat16_number(child_environment: dict[str, str]) -> None:
    for capability, lines in printed(NEIGHBOURS_PROGRAM, child_environment):
        assert len(lines) == 5
        for name, *errors in lines:
            assert all(float(error) <= 0.52 for error in errors), (name, capability, errors)


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
