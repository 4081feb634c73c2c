"""Proves: strides, storage offsets and lazy views of inputs, gradients and parameters change no bit
of any result, the memory between strided elements is never read, and outputs have the strides that
PyTorch's ops give them.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from tests.support.cases import (
    GELU_CASES,
    NORM_CASES,
    OP_CASES,
    Call,
    OpCase,
    Results,
    evaluate,
)
from tests.support.shapes import (
    BFLOAT16,
    FLOAT32,
    LAYOUTS,
    Dtypes,
    lazily_negated,
    make_call,
    misaligned,
)

every_op = pytest.mark.parametrize("case", OP_CASES, ids=str)
every_norm = pytest.mark.parametrize("case", NORM_CASES, ids=str)
float32_and_bfloat16 = pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16], ids=str)

SIZES = [(6, 10, 129), (5, 1000)]


def assert_same_bits(actual: Results, expected: Results) -> None:
    for name, value in expected._asdict().items():
        if value is None:
            assert getattr(actual, name) is None, name
        else:
            assert torch.equal(getattr(actual, name), value), name


def relaid(call: Call, **changed: torch.Tensor) -> Call:
    """The call with some tensors replaced by equal ones: only their layout differs."""
    for name, tensor in changed.items():
        assert torch.equal(getattr(call, name), tensor), name
    return dataclasses.replace(call, **changed)


@every_op
@float32_and_bfloat16
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
class TestStrides:
    def test_of_input(
        self,
        case: OpCase,
        dtypes: Dtypes,
        size: tuple[int, ...],
        layout: str,
        device: torch.device,
    ) -> None:
        call = make_call(case, size, dtypes, device)
        changed = relaid(call, input=LAYOUTS[layout](call.input))
        assert_same_bits(evaluate(case.memopt, changed), evaluate(case.memopt, call))

    def test_of_grad_output(
        self,
        case: OpCase,
        dtypes: Dtypes,
        size: tuple[int, ...],
        layout: str,
        device: torch.device,
    ) -> None:
        call = make_call(case, size, dtypes, device)
        changed = relaid(call, grad_output=LAYOUTS[layout](call.grad_output))
        assert_same_bits(evaluate(case.memopt, changed), evaluate(case.memopt, call))

    def test_of_both(
        self,
        case: OpCase,
        dtypes: Dtypes,
        size: tuple[int, ...],
        layout: str,
        device: torch.device,
    ) -> None:
        call = make_call(case, size, dtypes, device)
        layout_of = LAYOUTS[layout]
        changed = relaid(call, input=layout_of(call.input), grad_output=layout_of(call.grad_output))
        assert_same_bits(evaluate(case.memopt, changed), evaluate(case.memopt, call))


@every_norm
@float32_and_bfloat16
def test_strides_of_weight_and_bias(case: OpCase, dtypes: Dtypes, device: torch.device) -> None:
    call = make_call(case, (5, 1000), dtypes, device)
    assert call.weight is not None
    assert call.bias is not None
    for layout in (LAYOUTS["every other column"], LAYOUTS["misaligned"]):
        changed = relaid(call, weight=layout(call.weight), bias=layout(call.bias))
        assert_same_bits(evaluate(case.memopt, changed), evaluate(case.memopt, call))


@every_norm
def test_weight_of_several_transposed_dimensions(case: OpCase, device: torch.device) -> None:
    call = make_call(case, (3, 8, 12), FLOAT32, device, normalized_dims=2)
    assert call.weight is not None
    changed = relaid(call, weight=LAYOUTS["transposed"](call.weight))
    assert_same_bits(evaluate(case.memopt, changed), evaluate(case.memopt, call))


@every_op
@float32_and_bfloat16
@pytest.mark.parametrize("elements", [1, 2, 3, 7, 8, 31])
def test_storage_offset_of_everything(
    case: OpCase, dtypes: Dtypes, elements: int, device: torch.device
) -> None:
    call = make_call(case, (5, 1000), dtypes, device)
    changed = call.map(lambda t: misaligned(t, elements))
    assert_same_bits(evaluate(case.memopt, changed), evaluate(case.memopt, call))


@every_op
@float32_and_bfloat16
def test_expanded_gradient_of_sum(case: OpCase, dtypes: Dtypes, device: torch.device) -> None:
    """out.sum().backward() sends back one element with strides of zero."""
    call = make_call(case, (5, 1000), dtypes, device)
    call = dataclasses.replace(call, grad_output=torch.ones_like(call.grad_output))
    expected = evaluate(case.memopt, call)
    leaves = call.leaves()
    output = case.memopt(leaves)
    output.sum().backward()
    actual = Results(
        output.detach(),
        leaves.input.grad,
        None if leaves.weight is None else leaves.weight.grad,
        None if leaves.bias is None else leaves.bias.grad,
    )
    assert_same_bits(actual, expected)


@every_op
def test_expanded_input_and_gradient(case: OpCase, device: torch.device) -> None:
    call = make_call(case, (6, 130), FLOAT32, device)
    whole = dataclasses.replace(
        call,
        input=call.input[:1].repeat(6, 1),
        grad_output=call.grad_output[:1].repeat(6, 1),
    )
    expanded = relaid(
        whole,
        input=call.input[:1].expand(6, 130),
        grad_output=call.grad_output[:1].expand(6, 130),
    )
    assert_same_bits(evaluate(case.memopt, expanded), evaluate(case.memopt, whole))


@every_op
def test_input_expanded_over_columns(case: OpCase, device: torch.device) -> None:
    call = make_call(case, (6, 130), FLOAT32, device)
    whole = dataclasses.replace(call, input=call.input[:, :1].repeat(1, 130))
    expanded = relaid(whole, input=call.input[:, :1].expand(6, 130))
    assert_same_bits(evaluate(case.memopt, expanded), evaluate(case.memopt, whole))


@every_op
def test_channels_last(case: OpCase, device: torch.device) -> None:
    call = make_call(case, (2, 6, 4, 5), FLOAT32, device)
    changed = relaid(
        call,
        input=call.input.to(memory_format=torch.channels_last),
        grad_output=call.grad_output.to(memory_format=torch.channels_last),
    )
    assert_same_bits(evaluate(case.memopt, changed), evaluate(case.memopt, call))


@every_op
def test_lazily_negated_views(case: OpCase, device: torch.device) -> None:
    call = make_call(case, (5, 130), FLOAT32, device)
    changed = relaid(
        call, input=lazily_negated(call.input), grad_output=lazily_negated(call.grad_output)
    )
    assert changed.input.is_neg()
    assert changed.grad_output.is_neg()
    assert_same_bits(evaluate(case.memopt, changed), evaluate(case.memopt, call))


@every_op
def test_overlapping_windows(case: OpCase, device: torch.device) -> None:
    """unfold makes rows that share elements."""
    call = make_call(case, (40, 16), FLOAT32, device)
    windows = call.input.reshape(-1)[: 39 * 4 + 16].unfold(0, 16, 4)
    whole = dataclasses.replace(call, input=windows.contiguous())
    changed = relaid(whole, input=windows)
    assert_same_bits(evaluate(case.memopt, changed), evaluate(case.memopt, whole))


@pytest.mark.parametrize("case", GELU_CASES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gelu_output_has_the_strides_that_pytorch_gives(
    case: OpCase, layout: str, device: torch.device
) -> None:
    x = LAYOUTS[layout](make_call(case, (6, 10, 129), FLOAT32, device).input)
    expected = F.gelu(x).stride()
    output = getattr(torch.ops.memopt, case.family)(x, approximate=case.approximate)
    assert output.stride() == expected


@every_norm
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norm_output_is_contiguous(case: OpCase, layout: str, device: torch.device) -> None:
    call = make_call(case, (6, 10, 129), FLOAT32, device)
    call = dataclasses.replace(call, input=LAYOUTS[layout](call.input))
    assert case.memopt(call).is_contiguous()
