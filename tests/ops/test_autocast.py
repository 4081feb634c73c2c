"""Proves: under autocast the ops compute in the autocast dtype, return it and save only 16-bit
activations, with float32 statistics; float64 is left alone; gradients arrive in the dtype of what
they belong to.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support.cases import NORM_CASES, OP_CASES, OpCase, evaluate
from tests.support.saved_bytes import SavedTensors
from tests.support.shapes import BFLOAT16, FLOAT32, FLOAT64, Dtypes, make_call

every_op = pytest.mark.parametrize("case", OP_CASES, ids=str)
every_norm = pytest.mark.parametrize("case", NORM_CASES, ids=str)
every_autocast_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@every_op
@every_autocast_dtype
def test_float32_is_computed_in_the_autocast_dtype(
    case: OpCase, dtype: torch.dtype, device: torch.device
) -> None:
    """Bit for bit what casting the input by hand gives; the float32 parameters stay float32."""
    call = make_call(case, (9, 130), FLOAT32, device)
    by_hand = dataclasses.replace(
        call, input=call.input.to(dtype), grad_output=call.grad_output.to(dtype)
    )
    expected = evaluate(case.memopt, by_hand)
    with torch.autocast(device.type, dtype):
        actual = evaluate(case.memopt, dataclasses.replace(by_hand, input=call.input))
    assert actual.output is not None
    assert actual.output.dtype == dtype
    assert actual.grad_input is not None
    assert actual.grad_input.dtype == torch.float32
    assert torch.equal(actual.output, expected.output)
    assert torch.equal(actual.grad_input, expected.grad_input.float())
    if case.normalizes:
        assert actual.grad_weight.dtype == torch.float32
        assert torch.equal(actual.grad_weight, expected.grad_weight)
        assert torch.equal(actual.grad_bias, expected.grad_bias)


@every_op
@every_autocast_dtype
def test_saves_the_narrow_input(case: OpCase, dtype: torch.dtype, device: torch.device) -> None:
    call = make_call(case, (9, 130), FLOAT32, device).leaves()
    parameters = [t for t in (call.weight, call.bias) if t is not None]
    with torch.autocast(device.type, dtype), SavedTensors(exclude=parameters) as saved:
        case.memopt(call)
    statistics = 2 * 4 * 9 if case.normalizes else 0
    assert saved.bytes == 2 * call.input.numel() + statistics
    assert {t.dtype for t in saved.tensors} <= {dtype, torch.float32}


@every_op
def test_backward_outside_of_autocast_gives_the_same_bits(
    case: OpCase, device: torch.device
) -> None:
    call = make_call(case, (9, 130), FLOAT32, device)
    grad_output = call.grad_output.bfloat16()

    def gradient(backward_in_autocast: bool) -> torch.Tensor:
        leaves = call.leaves()
        with torch.autocast(device.type, torch.bfloat16):
            output = case.memopt(leaves)
            if backward_in_autocast:
                output.backward(grad_output)
        if not backward_in_autocast:
            output.backward(grad_output)
        assert leaves.input.grad is not None
        return leaves.input.grad

    assert torch.equal(gradient(True), gradient(False))


@every_op
def test_float64_is_left_alone(case: OpCase, device: torch.device) -> None:
    call = make_call(case, (9, 130), FLOAT64, device)
    expected = evaluate(case.memopt, call)
    with torch.autocast(device.type, torch.bfloat16):
        actual = evaluate(case.memopt, call)
    for ours, plain in zip(actual, expected, strict=True):
        assert (ours is None) == (plain is None)
        assert ours is None or torch.equal(ours, plain)


@every_norm
def test_16_bit_parameters_follow_the_input(case: OpCase, device: torch.device) -> None:
    """float16 parameters beside an input that autocast makes bfloat16."""
    call = make_call(case, (9, 130), Dtypes(torch.float32, torch.float16), device)
    by_hand = call.map(torch.Tensor.bfloat16)
    expected = evaluate(case.memopt, by_hand)
    with torch.autocast(device.type, torch.bfloat16):
        actual = evaluate(case.memopt, dataclasses.replace(call, grad_output=by_hand.grad_output))
    assert torch.equal(actual.output, expected.output)
    assert actual.grad_weight.dtype == torch.float16


@every_op
def test_disabled_autocast_region(case: OpCase, device: torch.device) -> None:
    call = make_call(case, (9, 130), FLOAT32, device)
    with (
        torch.autocast(device.type, torch.bfloat16),
        torch.autocast(device.type, enabled=False),
    ):
        output = case.memopt(call)
    assert output.dtype == torch.float32
    assert torch.equal(output, case.memopt(call))


@every_op
def test_narrow_input_is_not_copied(case: OpCase, device: torch.device) -> None:
    """The input is saved itself, as without autocast."""
    call = make_call(case, (9, 130), BFLOAT16, device).leaves()
    with torch.autocast(device.type, torch.bfloat16), SavedTensors() as saved:
        case.memopt(call)
    pointers = {t.data_ptr() for t in saved.tensors}
    assert call.input.data_ptr() in pointers
