"""Proves: NaN, infinities and signed zeros come out of every op where they come out of PyTorch's,
and a row that holds one leaves the other rows alone.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.cases import (
    FURTHER_CASES,
    GELU_CASES,
    NORM_CASES,
    NORMALIZING_CASES,
    OP_CASES,
    OpCase,
    Results,
    evaluate,
)
from tests.support.selection import every_op_with
from tests.support.shapes import BFLOAT16, FLOAT32, FLOAT64, Dtypes

every_op = pytest.mark.parametrize("case", OP_CASES, ids=str)
every_norm = pytest.mark.parametrize("case", NORMALIZING_CASES, ids=str)
every_layer_norm = pytest.mark.parametrize("case", NORM_CASES, ids=str)
float16 = Dtypes(torch.float16, torch.float16)
every_dtype = pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16, float16, FLOAT64], ids=str)
SPECIAL = [math.nan, math.inf, -math.inf]
special = pytest.mark.parametrize("value", SPECIAL)


def assert_special_where_pytorch_is(actual: Results, expected: Results) -> None:
    """NaN or infinite in the same places.

    PyTorch's kernels make some infinities NaN, differently for each dtype. There memopt may keep an
    infinity; it makes no NaN of an infinity that PyTorch keeps, and never flips its sign.
    """
    for name, torchs in expected.items():
        if torchs is None:
            continue
        ours = actual[name].to(torchs.device)
        assert torch.equal(ours.isfinite(), torchs.isfinite()), name
        infinite = torchs.isinf()
        assert torch.equal(ours[infinite], torchs[infinite]), name


@every_op
@every_dtype
@special
@pytest.mark.parametrize("column", [0, 64, 129])
def test_in_the_input(
    case: OpCase, dtypes: Dtypes, value: float, column: int, device: torch.device
) -> None:
    """Column 129 of 130 is in the tail of every vector width."""
    clean = case.make_call((5, 130), dtypes, device)
    for name in clean.activations:
        call = clean.map(torch.Tensor.clone)
        getattr(call, name)[2, column] = value
        expected = evaluate(case.torch, call.map(torch.Tensor.cpu) if is_rms_norm(case) else call)
        assert_special_where_pytorch_is(evaluate(case.memopt, call), expected)


def is_rms_norm(case: OpCase) -> bool:
    """PyTorch's fused kernel on a GPU makes NaN of a whole row that holds an infinity, its kernels
    on a CPU do not."""
    return case.family.endswith("rms_norm")


@every_op_with(
    FURTHER_CASES, dtypes=[FLOAT32, BFLOAT16, float16, FLOAT64], value=SPECIAL, column=[0, 129]
)
def test_in_the_input_of_further_functions(
    case: OpCase, dtypes: Dtypes, value: float, column: int, device: torch.device
) -> None:
    test_in_the_input(case, dtypes, value, column, device)


@every_op
@every_dtype
@special
def test_in_the_gradient(case: OpCase, dtypes: Dtypes, value: float, device: torch.device) -> None:
    for name in case.outputs:
        call = case.make_call((5, 130), dtypes, device)
        call.grads[name][2, 3] = value
        assert_special_where_pytorch_is(evaluate(case.memopt, call), evaluate(case.torch, call))


@every_norm
@every_dtype
@special
def test_in_weight_or_bias(
    case: OpCase, dtypes: Dtypes, value: float, device: torch.device
) -> None:
    for name in case.parameters:
        call = case.make_call((5, 130), dtypes, device)
        getattr(call, name)[3] = value
        assert_special_where_pytorch_is(evaluate(case.memopt, call), evaluate(case.torch, call))


@every_op
@every_dtype
@special
def test_other_rows_keep_their_bits(
    case: OpCase, dtypes: Dtypes, value: float, device: torch.device
) -> None:
    clean = case.make_call((7, 130), dtypes, device)
    dirty = clean.map(torch.Tensor.clone)
    for tensor in dirty.activations.values():
        tensor[2, 100] = value
    actual, expected = evaluate(case.memopt, dirty), evaluate(case.memopt, clean)
    others = [0, 1, 3, 4, 5, 6]
    for name in (*case.outputs, *(f"grad_{name}" for name in clean.activations)):
        if expected.get(name) is not None:
            assert torch.equal(actual[name][others], expected[name][others]), name


@every_layer_norm
@every_dtype
def test_zero_eps_on_constant_rows_is_nan_as_in_pytorch(
    case: OpCase, dtypes: Dtypes, device: torch.device
) -> None:
    call = case.make_call((3, 16), dtypes, device, values=torch.ones(3, 16))
    call = call.replace(eps=0.0)
    assert case.torch(call).isnan().all()
    assert case.memopt(call).isnan().all()


@pytest.mark.parametrize("case", GELU_CASES, ids=str)
@every_dtype
def test_gelu_of_zeros_keeps_their_sign(case: OpCase, dtypes: Dtypes, device: torch.device) -> None:
    call = case.make_call((1, 3), dtypes, device, values=torch.tensor([0.0, -0.0, 0.0]))
    output = case.memopt(call)
    assert torch.equal(output.signbit().cpu(), torch.tensor([[False, True, False]]))


@pytest.mark.parametrize("case", GELU_CASES, ids=str)
@every_dtype
def test_gelu_saturates(case: OpCase, dtypes: Dtypes, device: torch.device) -> None:
    """Far from zero it is x or 0 exactly and its derivative 1 or 0, up to the largest finite
    number.
    """
    largest = torch.finfo(dtypes.tensor).max
    values = torch.tensor([40, 1e3, largest, -40, -1e3, -largest], dtype=torch.float64)
    call = case.make_call((1, 6), dtypes, device, values=values)
    call = call.replace(grad_output=torch.ones_like(call.grad_output))
    results = evaluate(case.memopt, call)
    assert torch.equal(results.output, call.input.clamp_min(0))
    assert torch.equal(results.grad_input, (call.input > 0).to(dtypes.tensor))
