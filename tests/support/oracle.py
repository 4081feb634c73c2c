"""The exact results of a call, in float64, and how large an error its arithmetic must be granted.

`exact_results` computes in float64 on the CPU with PyTorch's own ops and autograd, on the inputs as
they were rounded to the dtype under test. `magnitudes` is the error analysis that tolerances.py
explains: for each element of each result, the size of what is rounded on the way to it, times how
much the result moves with that. One letter per quantity as in csrc/kernels/layer_norm.h, with e_
for its error in roundings of the type that sums have.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .cases import Call, OpCase, Results, evaluate
from .tolerances import allowance, largest_error, sums_dtype, worst_error

# Bounds of GELU's first and second derivative, erf and tanh form alike (maxima 1.129 and 0.798).
GELU_SLOPE = 1.13
GELU_CURVATURE = 0.8


class Moments(NamedTuple):
    """Of each row, in the shape of the op's statistics."""

    mean: Tensor
    std: Tensor
    rstd: Tensor


def _wide(call: Call) -> Call:
    return call.map(lambda t: t.detach().cpu().double())


def _normalized_dims(call: Call) -> tuple[int, ...]:
    return tuple(range(-len(call.normalized_shape), 0))


def exact_moments(call: Call) -> Moments:
    """Mean, standard deviation and reciprocal of sqrt(variance + eps), in float64.

    The mean of the deviations from a first mean corrects it: otherwise its rounding would be the
    error at a mean/std of 1e4.
    """
    x, dims = _wide(call).input, _normalized_dims(call)
    first = x.mean(dims, keepdim=True)
    second = (x - first).mean(dims, keepdim=True)
    variance = (x - first - second).square().mean(dims, keepdim=True)
    return Moments(first + second, variance.sqrt(), (variance + call.eps).rsqrt())


def exact_gelu(x: Tensor, approximate: str) -> Tensor:
    """max(x, 0) + n cdf(n) with n = -|x|: nothing cancels in either tail, neither in the value nor
    in the derivative.
    """
    n = torch.where(x < 0, x, -x)
    if approximate == "none":
        cdf = 0.5 * torch.erfc(n * -math.sqrt(0.5))
    else:
        cdf = torch.sigmoid(2 * math.sqrt(2 / math.pi) * (n + 0.044715 * n**3))
    return torch.where(x < 0, 0.0, x) + n * cdf


def exact_results(case: OpCase, call: Call) -> Results:
    """Output and gradients in float64 on the CPU."""
    mean = exact_moments(call).mean if case.normalizes else 0.0

    def exact(call: Call) -> Tensor:
        result = call.input
        if case.normalizes:
            # The norm does not see a shift of its row, and centred rows leave its sums nothing to
            # cancel.
            result = F.layer_norm(
                result - mean, call.normalized_shape, call.weight, call.bias, call.eps
            )
        if case.approximate is not None:
            result = exact_gelu(result, case.approximate)
        return result

    return evaluate(exact, _wide(call))


def magnitudes(case: OpCase, call: Call) -> Results:
    """Of each result, elementwise: its first-order error in roundings of the type of the sums."""
    call = _wide(call)
    x, dy = call.input, call.grad_output
    if not case.normalizes:
        return Results(x.abs(), GELU_SLOPE * dy.abs(), None, None)

    dims = _normalized_dims(call)
    mean, std, rstd = exact_moments(call)
    xhat = (x - mean) * rstd
    gamma = torch.ones_like(x) if call.weight is None else call.weight
    beta = torch.zeros_like(x) if call.bias is None else call.bias
    z = xhat * gamma + beta
    # The mean is rounded, and so are the sums of deviations, which are of the size of std, behind
    # mean and rstd.
    e_xhat = (mean.abs() + std) * rstd + xhat.abs()
    e_z = gamma.abs() * e_xhat + beta.abs()
    if case.approximate is None:
        dz, e_dz, e_y = dy.abs(), torch.zeros_like(dy), e_z
    else:
        dz = dy.abs() * GELU_SLOPE
        e_dz = dy.abs() * (GELU_SLOPE + GELU_CURVATURE * e_z)
        e_y = z.abs() + GELU_SLOPE * e_z

    def row_mean(t: Tensor) -> Tensor:
        return t.mean(dims, keepdim=True)

    g = dz * gamma.abs()
    e_g = g + e_dz * gamma.abs()
    mean_gx = row_mean(g * xhat.abs())
    e_mean_gx = row_mean(g * e_xhat + e_g * xhat.abs())
    e_dx = rstd * (e_g + row_mean(e_g) + e_xhat * mean_gx + xhat.abs() * e_mean_gx)
    row_dims = tuple(range(x.dim() - len(dims)))
    e_dgamma = dz * e_xhat + e_dz * xhat.abs()
    e_dbeta = dz + e_dz
    if row_dims:
        e_dgamma, e_dbeta = e_dgamma.sum(row_dims), e_dbeta.sum(row_dims)
    return Results(
        e_y,
        e_dx,
        None if call.weight is None else e_dgamma,
        None if call.bias is None else e_dbeta,
    )


def allowances(case: OpCase, call: Call, exact: Results) -> Results:
    """The error that each result of the call may have, elementwise."""
    magnitude = magnitudes(case, call)
    dtypes = result_dtypes(call)
    sums = sums_dtype(call.input.dtype)
    allowed = {
        name: allowance(name, value, getattr(magnitude, name), getattr(dtypes, name), sums)
        for name, value in exact._asdict().items()
        if value is not None
    }
    return Results(**{**dict.fromkeys(Results._fields), **allowed})


def worst_errors(actual: Results, exact: Results, allowed: Results) -> dict[str, float]:
    """worst_error of each result that the call has."""
    return {
        name: worst_error(getattr(actual, name), value, getattr(allowed, name))
        for name, value in exact._asdict().items()
        if value is not None
    }


def assert_accurate(case: OpCase, call: Call) -> None:
    """Forward and all gradients are right to within the allowance, or at least as right as
    PyTorch's.
    """
    assert_results_accurate(case, call, evaluate(case.memopt, call))


def assert_results_accurate(case: OpCase, call: Call, actual: Results) -> None:
    """The same of results that are there already."""
    exact = exact_results(case, call)
    for value, reference, dtype in zip(actual, exact, result_dtypes(call), strict=True):
        assert (value is None) == (reference is None)
        assert value is None or value.dtype == dtype
        assert value is None or value.shape == reference.shape
    allowed = allowances(case, call, exact)
    limit = largest_error(call.input.dtype)
    ours = worst_errors(actual, exact, allowed)
    if all(error <= limit for error in ours.values()):
        return
    torchs = worst_errors(evaluate(case.torch, call), exact, allowed)
    for name, error in ours.items():
        assert error <= max(limit, torchs[name]), (
            f"{case} on {call}: the error of {name} is {error:.3g} times the allowance, "
            f"PyTorch's is {torchs[name]:.3g}"
        )


class ResultDtypes(NamedTuple):
    output: torch.dtype
    grad_input: torch.dtype
    grad_weight: torch.dtype | None
    grad_bias: torch.dtype | None


def result_dtypes(call: Call) -> ResultDtypes:
    """The dtype that each result of the call must have: that of what it belongs to."""
    return ResultDtypes(
        call.input.dtype,
        call.input.dtype,
        None if call.weight is None else call.weight.dtype,
        None if call.bias is None else call.bias.dtype,
    )
