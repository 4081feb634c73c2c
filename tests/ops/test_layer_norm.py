"""Proves what is particular to layer_norm: a row worked out by hand, the invariances of the formula
in all bits, and that neither the shape of the normalised part nor the width of its parameters' type
changes a result.
"""

from __future__ import annotations

import math

import pytest
import torch

import memopt
from tests.support.cases import NORM_CASES, OpCase, evaluate
from tests.support.shapes import BFLOAT16, FLOAT32, Dtypes

LAYER_NORM = NORM_CASES[0]
every_norm = pytest.mark.parametrize("case", NORM_CASES, ids=str)


def test_by_hand(device: torch.device) -> None:
    """Mean 2.5, variance 1.25."""
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64, device=device)
    weight = torch.tensor([1.0, 2.0, 1.0, 1.0], dtype=torch.float64, device=device)
    bias = torch.tensor([0.0, 0.0, 10.0, 0.0], dtype=torch.float64, device=device)
    s = math.sqrt(1.25)
    expected = torch.tensor([[-1.5 / s, -1.0 / s, 0.5 / s + 10, 1.5 / s]], dtype=torch.float64)
    output = memopt.functional.layer_norm(x, (4,), weight, bias, eps=0.0)
    torch.testing.assert_close(output.cpu(), expected, rtol=1e-15, atol=0)


def test_one_column_is_the_bias(device: torch.device) -> None:
    call = LAYER_NORM.make_call((5, 1), FLOAT32, device)
    assert call.bias is not None
    results = evaluate(LAYER_NORM.memopt, call)
    assert torch.equal(results.output, call.bias.expand(5, 1))
    assert not results.grad_input.any()
    assert not results.grad_weight.any()


@pytest.mark.parametrize("shift", [-3, 5])
def test_scaling_by_a_power_of_two_changes_no_bit(shift: int, device: torch.device) -> None:
    call = LAYER_NORM.make_call((9, 769), FLOAT32, device).replace(eps=0.0)
    scaled = call.replace(input=call.input * 2.0**shift)
    plain, other = evaluate(LAYER_NORM.memopt, call), evaluate(LAYER_NORM.memopt, scaled)
    assert torch.equal(other.output, plain.output)
    assert torch.equal(other.grad_input, plain.grad_input * 2.0**-shift)
    assert torch.equal(other.grad_weight, plain.grad_weight)


def test_gradient_is_orthogonal_to_what_the_norm_removes(device: torch.device) -> None:
    """Adding a constant to a row, or (without eps) scaling it, changes nothing: so their
    derivatives are zero.
    """
    call = LAYER_NORM.make_call((9, 130), Dtypes(torch.float64, torch.float64), device)
    call = call.replace(eps=0.0)
    dx = evaluate(LAYER_NORM.memopt, call).grad_input
    centred = call.input - call.input.mean(-1, keepdim=True)
    assert dx.sum(-1).abs().max() < 1e-13
    assert (dx * centred).sum(-1).abs().max() < 1e-13


@every_norm
def test_flattened_and_several_normalized_dimensions_give_the_same_bits(
    case: OpCase, device: torch.device
) -> None:
    call = case.make_call((7, 4, 5, 6), FLOAT32, device, normalized_dims=3)
    flat = call.map(lambda t: t.reshape((-1, 120) if t.dim() == 4 else (120,)))
    flat = flat.replace(normalized_shape=(120,))
    many, one = evaluate(case.memopt, call), evaluate(case.memopt, flat)
    for name, b in one.items():
        a = many[name]
        assert torch.equal(a.reshape(b.shape), b), name
    assert many.grad_weight.shape == (4, 5, 6)


@every_norm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_parameters_of_16_bit_values_change_no_bit_of_the_output(
    case: OpCase, dtype: torch.dtype, device: torch.device
) -> None:
    narrow = case.make_call((9, 769), Dtypes(dtype, dtype), device)
    wide = narrow.replace(weight=narrow.weight.float(), bias=narrow.bias.float())
    a, b = evaluate(case.memopt, narrow), evaluate(case.memopt, wide)
    assert torch.equal(a.output, b.output)
    assert torch.equal(a.grad_input, b.grad_input)
    assert b.grad_weight.dtype == b.grad_bias.dtype == torch.float32
    assert torch.equal(a.grad_weight, b.grad_weight.to(dtype))
    assert torch.equal(a.grad_bias, b.grad_bias.to(dtype))


@every_norm
def test_ones_and_zeros_are_no_parameters(case: OpCase, device: torch.device) -> None:
    call = case.make_call((9, 769), BFLOAT16, device, weight=False, bias=False)
    shape = call.normalized_shape
    affine = call.replace(weight=call.input.new_ones(shape), bias=call.input.new_zeros(shape))
    a, b = evaluate(case.memopt, call), evaluate(case.memopt, affine)
    assert torch.equal(a.output, b.output)
    assert torch.equal(a.grad_input, b.grad_input)


@every_norm
def test_no_rows_give_zero_weight_gradients(case: OpCase, device: torch.device) -> None:
    results = evaluate(case.memopt, case.make_call((0, 33), FLOAT32, device))
    assert results.output.shape == results.grad_input.shape == (0, 33)
    assert torch.equal(results.grad_weight, torch.zeros(33, device=device))
    assert torch.equal(results.grad_bias, torch.zeros(33, device=device))
