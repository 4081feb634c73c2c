"""Proves what is particular to activations: every 16-bit number there is through each of them; the
published values, tails and symmetries of GELU and the logistic functions; relu at its corner.
"""

from __future__ import annotations

import math

import pytest
import torch

import memopt
from tests.support.cases import (
    ACTIVATION_CASES,
    FURTHER_ACTIVATION_CASES,
    GELU_CASES,
    OpCase,
    evaluate,
)
from tests.support.oracle import assert_accurate
from tests.support.shapes import FLOAT32, Dtypes
from tests.support.tolerances import roundoff

every_activation = pytest.mark.parametrize(
    "case", [*ACTIVATION_CASES, *FURTHER_ACTIVATION_CASES], ids=str
)
every_form = pytest.mark.parametrize("case", GELU_CASES, ids=str)


def every_number(dtype: torch.dtype) -> torch.Tensor:
    """All finite numbers of a 16-bit type, as float64."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    numbers = bits.view(dtype).double()
    return numbers[numbers.isfinite()]


def test_published_values_of_gelu(device: torch.device) -> None:
    x = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64, device=device)
    phi = [0.5 * math.erfc(-v / math.sqrt(2)) for v in x.tolist()]
    erf_form = x * torch.tensor(phi, dtype=torch.float64, device=device)
    torch.testing.assert_close(memopt.functional.gelu(x), erf_form, rtol=1e-15, atol=0)
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    tanh_form = 0.5 * x * (1 + torch.tanh(u))
    torch.testing.assert_close(
        memopt.functional.gelu(x, approximate="tanh"), tanh_form, rtol=1e-15, atol=1e-16
    )


def test_the_two_forms_differ(device: torch.device) -> None:
    """By up to 4.7e-4, near |x| = 2.2: neither stands in for the other."""
    x = torch.linspace(-4, 4, 1001, device=device)
    difference = memopt.functional.gelu(x) - memopt.functional.gelu(x, approximate="tanh")
    assert 4e-4 < difference.abs().max() < 5e-4


def test_default_is_the_erf_form(device: torch.device) -> None:
    x = torch.linspace(-4, 4, 101, device=device)
    assert torch.equal(memopt.functional.gelu(x), memopt.functional.gelu(x, approximate="none"))


@every_activation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number(case: OpCase, dtype: torch.dtype, device: torch.device) -> None:
    values = every_number(dtype)
    call = case.make_call((values.numel(),), Dtypes(dtype, dtype), device, values=values)
    assert_accurate(case, call)


def test_gelu_of_every_bfloat16_number_is_within_a_rounding(device: torch.device) -> None:
    """On a CPU it is computed for bfloat16 alone: at most 0.52 of the distance of two neighbours
    away, in both tails, where half of it is rounding. Results below 2^-126 are left out.
    """
    x = every_number(torch.bfloat16).to(device)
    x = x[x.isfinite() & (x.abs() < 2.0**100)]
    exact = x.double() * torch.special.erfc(-x.double() / math.sqrt(2)) / 2
    x, exact = x[exact.abs() >= 2.0**-126], exact[exact.abs() >= 2.0**-126]
    error = (memopt.functional.gelu(x).double() - exact).abs()
    assert (error <= 0.52 * 2.0 ** (exact.abs().log2().floor() - 7)).all()


@every_activation
def test_dense_grid_in_float32(case: OpCase, device: torch.device) -> None:
    """Through the middle and both tails, until the value is 0 or x."""
    values = torch.linspace(-16, 16, 200_001, dtype=torch.float64)
    assert_accurate(case, case.make_call((values.numel(),), FLOAT32, device, values=values))


@every_form
def test_left_tail_of_gelu_is_negative_and_vanishes(case: OpCase, device: torch.device) -> None:
    """1 + erf(x) computed as such is zero, or of either sign, from x = -5.5 on."""
    x = torch.linspace(-9, -0.1, 10_001, device=device)
    y = memopt.functional.gelu(x, approximate=case.approximate)
    assert (y < 0).all()
    assert (y[x < -6].abs() < 1e-7).all()


@every_form
def test_symmetry_of_gelu(case: OpCase, device: torch.device) -> None:
    """gelu(x) - gelu(-x) = x, to a few roundings."""
    x = torch.linspace(0, 8, 10_001, device=device)
    gelu = case.approximate
    odd_part = memopt.functional.gelu(x, approximate=gelu) - memopt.functional.gelu(
        -x, approximate=gelu
    )
    assert ((odd_part - x).abs() <= 4 * roundoff(torch.float32) * x).all()


@every_activation
def test_any_shape(case: OpCase, device: torch.device) -> None:
    """Elementwise: from no dimension to five, and empty."""
    for size in [(), (1,), (0,), (3, 0, 2), (2, 3, 4, 5, 6)]:
        assert_accurate(case, case.make_call(size, FLOAT32, device))


def test_logistic_keeps_its_digits_in_the_left_tail(device: torch.device) -> None:
    """exp(x) there, to a few roundings of the result however far from zero."""
    if device.type == "cpu" and memopt.build_info()["cpu_capability"] == "baseline":
        pytest.skip("needs a fused multiply-add")
    x = torch.linspace(-80, -20, 10_001, device=device)
    exact = torch.sigmoid(x.double())
    for actual, expected in (
        (memopt.functional.sigmoid(x), exact),
        (memopt.functional.silu(x), x.double() * exact),
    ):
        assert ((actual.double() / expected - 1).abs() <= 5 * roundoff(torch.float32)).all()


def test_relu_at_its_corner(device: torch.device) -> None:
    """The derivative at both zeros is 0, as PyTorch's; NaN goes through, and so does its
    gradient.
    """
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, math.nan, 1e-45], device=device, requires_grad=True)
    for ours, torchs in (
        (memopt.functional.relu, torch.relu),
        (memopt.functional.relu_squared, lambda x: torch.relu(x).square()),
    ):
        (actual,) = torch.autograd.grad(ours(x).sum(), x)
        (expected,) = torch.autograd.grad(torchs(x).sum(), x)
        torch.testing.assert_close(ours(x), torchs(x), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", ACTIVATION_CASES[3:6:2], ids=str)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_where_relu_is_flat_no_gradient_comes_through(
    case: OpCase, value: float, device: torch.device
) -> None:
    call = case.make_call((1, 64), FLOAT32, device)
    call = call.replace(input=-call.input.abs(), grad_output=torch.full_like(call.input, value))
    assert not evaluate(case.memopt, call).grad_input.any()


def test_unknown_activation_of_the_backward_op(device: torch.device) -> None:
    x = torch.zeros(2, device=device)
    message = "activation backward: activation must be one of 'gelu', .*'sigmoid', .*got 'tanh'"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.memopt._activation_backward(x, x, activation="tanh")
