"""The steps of batch norm across ranks that kernels compute, run by the interpreter: moments
without an output, and the input's gradient by means that are given.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.bits import assert_same_bits
from tests.support.cases import Call
from tests.support.cases.channel_norm import ChannelNormCase
from tests.support.shapes import DTYPES, FLOAT32, STATISTICS, Dtypes, channels_last
from tests.support.tolerances import STATISTICS_ROUNDINGS, roundoff, sums_dtype

from . import kernels
from .device import Device
from .drivers import channel_norm
from .drivers.run import Run
from .kernels import DENSE

CASE = ChannelNormCase("batch_norm")
every_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=str)
in_both_orders = pytest.mark.parametrize("order", [torch.clone, channels_last])


def call_of(dtypes: Dtypes, order: Callable, **choices: object) -> Call:
    call = CASE.make_call((2, 4, 9, 10), dtypes, torch.device("cpu"), **choices)
    return call.map(lambda t: order(t))


@every_dtype
@in_both_orders
def test_moments_are_those_of_the_whole_kernel(
    simt: Device, dtypes: Dtypes, order: Callable
) -> None:
    call = call_of(dtypes, order)
    _, saved = kernels.forward(simt, CASE, call)
    mean, _, variance = channel_norm.moments(Run(simt, DENSE), CASE, call)
    assert_same_bits([mean], [saved["mean"]])
    torch.testing.assert_close((variance + call.eps).rsqrt(), saved["rstd"])


@in_both_orders
@pytest.mark.parametrize("name", ["mean 1e4 std 1", "constant rows"])
def test_mean_and_shift_together_are_exact_to_the_deviations(
    simt: Device, order: Callable, name: str
) -> None:
    """The rounding of the mean alone would be 1e4 times that."""
    values = STATISTICS[name](1, 2 * 4 * 9 * 10)
    call = call_of(FLOAT32, order, values=values)
    exact = call.input.double().mean((0, 2, 3))
    std = call.input.double().var((0, 2, 3)).sqrt()
    mean, shift, _ = channel_norm.moments(Run(simt, DENSE), CASE, call)
    error = (mean.double() + shift - exact).abs()
    rounding = STATISTICS_ROUNDINGS * roundoff(torch.float32)
    assert (error <= rounding * (std + exact.abs() * roundoff(torch.float32))).all()


@every_dtype
@in_both_orders
def test_the_gradient_by_given_means(simt: Device, dtypes: Dtypes, order: Callable) -> None:
    """Of the batch's own means it has the bits of the whole kernel's."""
    call = call_of(dtypes, order, weight=False, bias=False)
    _, saved = kernels.forward(simt, CASE, call)
    expected = kernels.backward(simt, CASE, call, saved)
    dtype = sums_dtype(call.input.dtype)
    dy, x = call.grad_output.to(dtype), call.input.to(dtype)
    xhat = (x - saved["mean"][:, None, None]) * saved["rstd"][:, None, None]
    means = torch.stack((dy.mean((0, 2, 3)), (dy * xhat).mean((0, 2, 3))), 1)
    dx = channel_norm.input_gradient(Run(simt, DENSE), CASE, call, saved, means)
    torch.testing.assert_close(dx, expected["grad_input"])
