"""Proves: under autocast the ops return the dtype that PyTorch's return, with the bits that they
have without autocast; tensors of several dtypes get the widest; float64 is left alone; gradients
arrive in the dtype of what they belong to. (With linears behind: test_linear.py, test_mlp.py.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from memopt.memory.saved import SavedTensors
from tests.support.bits import assert_same_bits
from tests.support.cases import (
    DROPOUT_ADD_NORM_CASES,
    NORMALIZING_CASES,
    OP_CASES,
    Call,
    OpCase,
    as_tuple,
    evaluate,
)
from tests.support.shapes import BFLOAT16, DTYPES, FLOAT32, FLOAT64, Dtypes

every_op = pytest.mark.parametrize("case", OP_CASES, ids=str)
every_norm = pytest.mark.parametrize("case", NORMALIZING_CASES, ids=str)
every_input = pytest.mark.parametrize("dtypes", DTYPES, ids=str)
every_autocast_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def dtypes_of(function: Callable[[Call], Any], call: Call) -> list[torch.dtype]:
    return [output.dtype for output in as_tuple(function(call))]


@every_op
@every_autocast_dtype
@every_input
def test_the_dtype_is_pytorchs(
    case: OpCase, dtypes: Dtypes, dtype: torch.dtype, device: torch.device
) -> None:
    """A norm of PyTorch's, and its square, return float32 for a 16-bit input on CUDA alone."""
    call = case.make_call((9, 130), dtypes, device)
    with torch.autocast(device.type, dtype):
        actual = dtypes_of(case.memopt, call)
        widened = case in (*NORMALIZING_CASES, *DROPOUT_ADD_NORM_CASES)
        widened |= "relu_squared" in str(case)
        if widened and device.type == "cuda":
            assert actual == [dtypes.tensor] * len(actual)
        else:
            assert actual == dtypes_of(case.torch, call)
    assert dtypes_of(case.memopt, call) == actual


@every_op
@every_autocast_dtype
@every_input
def test_results_are_those_without_autocast(
    case: OpCase, dtypes: Dtypes, dtype: torch.dtype, device: torch.device
) -> None:
    """An explicit float32 activation (sigmoid(logits.float())) is left alone, say."""
    call = case.make_call((9, 130), dtypes, device)
    expected = evaluate(case.memopt, call)
    with torch.autocast(device.type, dtype):
        actual = evaluate(case.memopt, call)
    assert_same_bits(actual, expected)
    assert [t.dtype for t in actual.values()] == [t.dtype for t in expected.values()]


@every_op
def test_tensors_of_two_dtypes_are_promoted(case: OpCase, device: torch.device) -> None:
    """As by PyTorch's own multiplication or addition. Gradients have each tensor's dtype."""
    call = case.make_call((9, 130), FLOAT32, device)
    names = [name for name in call.activations if name not in call.constants]
    if len(names) < 2:
        pytest.skip("it has one tensor")
    narrow = names[-1]
    rounded = getattr(call, narrow).bfloat16()
    expected = evaluate(case.memopt, call.replace(**{narrow: rounded.float()}))
    with torch.autocast(device.type, torch.bfloat16):
        actual = evaluate(case.memopt, call.replace(**{narrow: rounded}))
    gradient = actual.pop(f"grad_{narrow}")
    assert gradient.dtype == torch.bfloat16
    assert torch.equal(gradient, expected.pop(f"grad_{narrow}").bfloat16())
    assert_same_bits(actual, expected)


@every_op
def test_backward_outside_of_autocast_gives_the_same_bits(
    case: OpCase, device: torch.device
) -> None:
    call = case.make_call((9, 130), FLOAT32, device)
    incoming = list(call.incoming.values())

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
def test_parameters_of_another_16_bit_dtype(case: OpCase, device: torch.device) -> None:
    """float16 parameters beside a float32 or bfloat16 input, which the kernels do not take, are
    float32, which holds them exactly.
    """
    for tensor in (torch.float32, torch.bfloat16):
        call = case.make_call((9, 130), Dtypes(tensor, torch.float16), device)
        wide = call.replace(**{name: t.float() for name, t in call.weights.items()})
        expected = evaluate(case.memopt, wide)
        with torch.autocast(device.type, torch.bfloat16):
            actual = evaluate(case.memopt, call)
        for name in case.outputs:
            assert torch.equal(actual[name], expected[name])
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
