"""Proves: under autocast the ops compute in the autocast dtype, return it and save only 16-bit
activations, with float32 statistics; float64 is left alone; gradients arrive in the dtype of what
they belong to.
"""

from __future__ import annotations

import pytest
import torch

from memopt.measure import SavedTensors
from tests.support.cases import (
    NORMALIZING_CASES,
    OP_CASES,
    OpCase,
    as_tuple,
    assert_same_bits,
    evaluate,
)
from tests.support.shapes import BFLOAT16, FLOAT32, FLOAT64, Dtypes

every_op = pytest.mark.parametrize("case", [case for case in OP_CASES if case.autocasts], ids=str)
every_norm = pytest.mark.parametrize("case", NORMALIZING_CASES, ids=str)
every_autocast_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@every_op
@every_autocast_dtype
def test_float32_is_computed_in_the_autocast_dtype(
    case: OpCase, dtype: torch.dtype, device: torch.device
) -> None:
    """Bit for bit what casting by hand gives; gradients return in the dtype of what they belong
    to.
    """
    call = case.make_call((9, 130), FLOAT32, device)
    by_hand = case.autocast(call, dtype)
    expected = evaluate(case.memopt, by_hand)
    with torch.autocast(device.type, dtype):
        actual = evaluate(case.memopt, call.replace(**by_hand.incoming))
    for name in case.outputs:
        assert actual[name].dtype == dtype
        assert torch.equal(actual[name], expected[name]), name
    for name in call.differentiable:
        gradient = actual[f"grad_{name}"]
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, expected[f"grad_{name}"].float()), name


@every_op
@every_autocast_dtype
def test_saves_the_narrow_input(case: OpCase, dtype: torch.dtype, device: torch.device) -> None:
    call = case.make_call((9, 130), FLOAT32, device).leaves()
    parameters = call.weights.values()
    with torch.autocast(device.type, dtype), SavedTensors(exclude=parameters) as saved:
        case.memopt(call)
    assert saved.bytes == case.saved_bytes(case.autocast(call, dtype))
    floating = {t.dtype for t in saved.tensors if t.is_floating_point()}
    assert floating <= {dtype, torch.float32}


@every_op
def test_backward_outside_of_autocast_gives_the_same_bits(
    case: OpCase, device: torch.device
) -> None:
    call = case.make_call((9, 130), FLOAT32, device)
    incoming = [t.bfloat16() for t in call.incoming.values()]

    def gradients(backward_in_autocast: bool) -> list[torch.Tensor]:
        leaves = call.leaves()
        with torch.autocast(device.type, torch.bfloat16):
            outputs = as_tuple(case.memopt(leaves))
            if backward_in_autocast:
                torch.autograd.backward(outputs, incoming)
        if not backward_in_autocast:
            torch.autograd.backward(outputs, incoming)
        return [t.grad for t in leaves.differentiable.values()]

    for inside, outside in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(inside, outside)


@every_op
def test_float64_is_left_alone(case: OpCase, device: torch.device) -> None:
    call = case.make_call((9, 130), FLOAT64, device)
    expected = evaluate(case.memopt, call)
    with torch.autocast(device.type, torch.bfloat16):
        actual = evaluate(case.memopt, call)
    assert_same_bits(actual, expected)


@every_norm
def test_16_bit_parameters_follow_the_input(case: OpCase, device: torch.device) -> None:
    """float16 parameters beside an input that autocast makes bfloat16."""
    call = case.make_call((9, 130), Dtypes(torch.float32, torch.float16), device)
    by_hand = call.map(torch.Tensor.bfloat16)
    expected = evaluate(case.memopt, by_hand)
    with torch.autocast(device.type, torch.bfloat16):
        actual = evaluate(case.memopt, call.replace(**by_hand.incoming))
    assert torch.equal(actual.output, expected.output)
    assert actual.grad_weight.dtype == torch.float16


@every_op
def test_disabled_autocast_region(case: OpCase, device: torch.device) -> None:
    call = case.make_call((9, 130), FLOAT32, device)
    with (
        torch.autocast(device.type, torch.bfloat16),
        torch.autocast(device.type, enabled=False),
    ):
        actual = evaluate(case.memopt, call)
    assert actual[case.outputs[0]].dtype == torch.float32
    assert_same_bits(actual, evaluate(case.memopt, call))


@every_op
def test_narrow_input_is_not_copied(case: OpCase, device: torch.device) -> None:
    """What is saved is saved itself, as without autocast."""
    call = case.make_call((9, 130), BFLOAT16, device).leaves()
    with torch.autocast(device.type, torch.bfloat16), SavedTensors() as saved:
        case.memopt(call)
    pointers = {t.data_ptr() for t in saved.tensors}
    assert {getattr(call, name).data_ptr() for name in case.kept} <= pointers
