"""Proves what is particular to rms_norm: a row worked out by hand, the invariances of the formula
in all bits, PyTorch's default of eps, its range, and the two forms of the weight.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import memopt
from tests.support.cases import RMS_NORM_CASES, OpCase, evaluate
from tests.support.shapes import BFLOAT16, FLOAT32, FLOAT64, Dtypes, random_normal

PLAIN, ZERO_CENTERED = RMS_NORM_CASES
every_form = pytest.mark.parametrize("case", RMS_NORM_CASES, ids=str)
every_type = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)


def test_by_hand(device: torch.device) -> None:
    """Mean square 7.5."""
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64, device=device)
    weight = torch.tensor([1.0, 2.0, 0.0, -1.0], dtype=torch.float64, device=device)
    s = math.sqrt(7.5)
    plain = torch.tensor([[1 / s, 4 / s, 0.0, -4 / s]], dtype=torch.float64)
    output = memopt.functional.rms_norm(x, (4,), weight, eps=0.0)
    torch.testing.assert_close(output.cpu(), plain, rtol=1e-15, atol=0)
    one_more = torch.tensor([[2 / s, 6 / s, 3 / s, 0.0]], dtype=torch.float64)
    output = memopt.functional.rms_norm(x, (4,), weight, eps=0.0, zero_centered_weight=True)
    torch.testing.assert_close(output.cpu(), one_more, rtol=1e-15, atol=0)


@every_type
def test_default_eps_is_pytorchs(dtype: torch.dtype, device: torch.device) -> None:
    """The epsilon of the type that is computed in: not of bfloat16, which would be 65536 times as
    large.
    """
    x = (random_normal(5, 130) * 1e-4).to(device, dtype)
    computed_in = torch.float64 if dtype == torch.float64 else torch.float32
    explicit = memopt.functional.rms_norm(x, (130,), eps=torch.finfo(computed_in).eps)
    assert torch.equal(memopt.functional.rms_norm(x, (130,)), explicit)
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(explicit, F.rms_norm(x, (130,)), rtol=tolerance, atol=tolerance)
    sum, residual = x + x, x
    outputs = memopt.functional.add_rms_norm(x, residual, (130,))
    assert torch.equal(outputs[0], memopt.functional.rms_norm(sum, (130,)))


def test_default_eps_in_the_derivatives(device: torch.device) -> None:
    """create_graph=True computes rstd again, with the same eps."""
    x = (random_normal(3, 6) * 1e-8).to(device).requires_grad_()
    grad = random_normal(3, 6, seed=7).to(device)
    output = memopt.functional.rms_norm(x, (6,))
    (plain,) = torch.autograd.grad(output, x, grad, retain_graph=True)
    (twice,) = torch.autograd.grad(output, x, grad, create_graph=True)
    assert twice.requires_grad
    torch.testing.assert_close(twice.detach(), plain, rtol=1e-12, atol=0)


@every_form
@pytest.mark.parametrize("shift", [-3, 5])
def test_scaling_by_a_power_of_two_changes_no_bit(
    case: OpCase, shift: int, device: torch.device
) -> None:
    call = case.make_call((9, 769), FLOAT32, device).replace(eps=0.0)
    scaled = call.replace(input=call.input * 2.0**shift)
    plain, other = evaluate(case.memopt, call), evaluate(case.memopt, scaled)
    assert torch.equal(other.output, plain.output)
    assert torch.equal(other.grad_input, plain.grad_input * 2.0**-shift)
    assert torch.equal(other.grad_weight, plain.grad_weight)


@every_form
def test_gradient_is_orthogonal_to_the_input(case: OpCase, device: torch.device) -> None:
    """Without eps, scaling a row changes nothing: so the derivative along it is zero."""
    call = case.make_call((9, 130), FLOAT64, device).replace(eps=0.0)
    dx = evaluate(case.memopt, call).grad_input
    assert (dx * call.input).sum(-1).abs().max() < 1e-12


@pytest.mark.parametrize("scale", [1e-30, 1e-19, 1e15, 1e18, 1e19, 1e30])
def test_finite_where_pytorchs_float32_is(scale: float, device: torch.device) -> None:
    values = random_normal(5, 130) * scale
    call = PLAIN.make_call((5, 130), FLOAT32, device, values=values)
    ours, torchs = evaluate(PLAIN.memopt, call), evaluate(PLAIN.torch, call)
    for name, expected in torchs.items():
        assert not (expected.isfinite() & ~ours[name].isfinite()).any(), name


def test_float16_squares_do_not_overflow(device: torch.device) -> None:
    x = torch.full((2, 1000), 60000.0, dtype=torch.float16, device=device)
    assert memopt.functional.rms_norm(x, (1000,)).eq(1).all()


def test_zero_centered_weight_of_zero_is_no_weight(device: torch.device) -> None:
    call = ZERO_CENTERED.make_call((9, 769), BFLOAT16, device)
    zero = call.replace(weight=torch.zeros_like(call.weight))
    a = evaluate(ZERO_CENTERED.memopt, zero)
    b = evaluate(ZERO_CENTERED.memopt, call.replace(weight=None))
    assert torch.equal(a.output, b.output)
    assert torch.equal(a.grad_input, b.grad_input)


def test_zero_centered_weight_is_added_to_one_in_float32(device: torch.device) -> None:
    """Bit for bit the float32 weight 1 + w; in bfloat16 1 + w would be rounded to 8 bits."""
    for dtypes in (FLOAT32, BFLOAT16, Dtypes(torch.bfloat16, torch.float32)):
        call = ZERO_CENTERED.make_call((9, 769), dtypes, device)
        whole = call.replace(weight=call.weight.float() + 1)
        a, b = evaluate(ZERO_CENTERED.memopt, call), evaluate(PLAIN.memopt, _plain(whole))
        assert torch.equal(a.output, b.output)
        assert torch.equal(a.grad_input, b.grad_input)
        assert torch.equal(a.grad_weight, b.grad_weight.to(dtypes.parameter))


def _plain(call):
    return call.replace(zero_centered_weight=False)


@every_form
def test_flattened_and_several_normalized_dimensions_give_the_same_bits(
    case: OpCase, device: torch.device
) -> None:
    call = case.make_call((7, 4, 5, 6), FLOAT32, device, normalized_dims=3)
    flat = call.map(lambda t: t.reshape((-1, 120) if t.dim() == 4 else (120,)))
    flat = flat.replace(normalized_shape=(120,))
    many, one = evaluate(case.memopt, call), evaluate(case.memopt, flat)
    for name, b in one.items():
        assert torch.equal(many[name].reshape(b.shape), b), name
    assert many.grad_weight.shape == (4, 5, 6)


@every_form
def test_no_rows_give_a_zero_weight_gradient(case: OpCase, device: torch.device) -> None:
    results = evaluate(case.memopt, case.make_call((0, 33), FLOAT32, device))
    assert results.output.shape == results.grad_input.shape == (0, 33)
    assert torch.equal(results.grad_weight, torch.zeros(33, device=device))
