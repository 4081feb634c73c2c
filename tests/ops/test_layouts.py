"""Proves: strides, storage offsets and lazy views of inputs, gradients and parameters change no bit
of any result, and the memory between strided elements is never read. (Which strides results have:
test_strides.py.)
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.bits import assert_same_bits
from tests.support.cases import NORMALIZING_CASES, OP_CASES, Call, OpCase, as_tuple, evaluate
from tests.support.selection import every_op_with
from tests.support.shapes import (
    BFLOAT16,
    FLOAT32,
    LAYOUTS,
    Dtypes,
    lazily_negated,
    misaligned,
)

every_op = pytest.mark.parametrize("case", OP_CASES, ids=str)
every_norm = pytest.mark.parametrize("case", NORMALIZING_CASES, ids=str)
float32_and_bfloat16 = pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16], ids=str)

SIZES = [(6, 10, 129), (5, 1000)]


def relaid(call: Call, **changed: torch.Tensor) -> Call:
    """The call with some tensors replaced by equal ones: only their layout differs."""
    for name, tensor in changed.items():
        assert torch.equal(getattr(call, name), tensor), name
    return call.replace(**changed)


def all_relaid(call: Call, layout: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    """The call with all activations and gradients laid out so."""
    names = (*call.activations, *call.incoming)
    return relaid(call, **{name: layout(getattr(call, name)) for name in names})


@every_op_with(OP_CASES, layout=list(LAYOUTS), dtypes=[FLOAT32, BFLOAT16], size=SIZES)
def test_strides_of_one_tensor_or_of_all(
    case: OpCase, dtypes: Dtypes, size: tuple[int, ...], layout: str, device: torch.device
) -> None:
    call = case.make_call(size, dtypes, device)
    expected = evaluate(case.memopt, call)
    for name, tensor in {**call.activations, **call.incoming}.items():
        changed = relaid(call, **{name: LAYOUTS[layout](tensor)})
        assert_same_bits(evaluate(case.memopt, changed), expected)
    assert_same_bits(evaluate(case.memopt, all_relaid(call, LAYOUTS[layout])), expected)


@pytest.mark.parametrize("case", [case for case in OP_CASES if case.parameters], ids=str)
@float32_and_bfloat16
def test_strides_of_parameters(case: OpCase, dtypes: Dtypes, device: torch.device) -> None:
    call = case.make_call((5, 1000), dtypes, device)
    assert call.weights
    for layout in (LAYOUTS["every other column"], LAYOUTS["misaligned"]):
        changed = relaid(call, **{name: layout(t) for name, t in call.weights.items()})
        assert_same_bits(evaluate(case.memopt, changed), evaluate(case.memopt, call))


@every_norm
def test_weight_of_several_transposed_dimensions(case: OpCase, device: torch.device) -> None:
    call = case.make_call((3, 8, 12), FLOAT32, device, normalized_dims=2)
    assert call.weight is not None
    changed = relaid(call, weight=LAYOUTS["transposed"](call.weight))
    assert_same_bits(evaluate(case.memopt, changed), evaluate(case.memopt, call))


@every_op_with(OP_CASES, elements=[1, 2, 3, 7, 8, 31], dtypes=[FLOAT32, BFLOAT16])
def test_storage_offset_of_everything(
    case: OpCase, dtypes: Dtypes, elements: int, device: torch.device
) -> None:
    call = case.make_call((5, 1000), dtypes, device)
    changed = call.map(lambda t: misaligned(t, elements))
    assert_same_bits(evaluate(case.memopt, changed), evaluate(case.memopt, call))


@every_op
@float32_and_bfloat16
def test_expanded_gradient_of_sum(case: OpCase, dtypes: Dtypes, device: torch.device) -> None:
    """out.sum().backward() sends back one element with strides of zero."""
    call = case.make_call((5, 1000), dtypes, device)
    call = call.replace(**{name: torch.ones_like(t) for name, t in call.incoming.items()})
    expected = evaluate(case.memopt, call)
    leaves = call.leaves()
    sum(output.sum() for output in as_tuple(case.memopt(leaves))).backward()
    for name, leaf in leaves.differentiable.items():
        assert torch.equal(leaf.grad, expected[f"grad_{name}"]), name


@every_op
def test_one_row_expanded(case: OpCase, device: torch.device) -> None:
    call = case.make_call((6, 130), FLOAT32, device)
    whole = call.map_activations(lambda t: t[:1].expand_as(t).contiguous())
    expanded = all_relaid(whole, lambda t: t[:1].expand_as(t))
    assert_same_bits(evaluate(case.memopt, expanded), evaluate(case.memopt, whole))


@every_op
def test_one_column_expanded(case: OpCase, device: torch.device) -> None:
    call = case.make_call((6, 130), FLOAT32, device)
    whole = call.map_activations(lambda t: t[:, :1].expand_as(t).contiguous())
    expanded = all_relaid(whole, lambda t: t[:, :1].expand_as(t))
    assert_same_bits(evaluate(case.memopt, expanded), evaluate(case.memopt, whole))


@every_op
def test_channels_last(case: OpCase, device: torch.device) -> None:
    call = case.make_call((2, 6, 4, 6), FLOAT32, device)
    changed = all_relaid(call, lambda t: t.to(memory_format=torch.channels_last))
    assert_same_bits(evaluate(case.memopt, changed), evaluate(case.memopt, call))


@every_op
def test_lazily_negated_views(case: OpCase, device: torch.device) -> None:
    call = case.make_call((5, 130), FLOAT32, device)
    changed = all_relaid(call, lazily_negated)
    assert changed.first.is_neg()
    assert_same_bits(evaluate(case.memopt, changed), evaluate(case.memopt, call))


@every_op
def test_overlapping_windows(case: OpCase, device: torch.device) -> None:
    """unfold makes rows that share elements."""

    def windows(t: torch.Tensor) -> torch.Tensor:
        rows, cols = t.shape
        return t.reshape(-1)[: (rows - 1) * 4 + cols].unfold(0, cols, 4)

    call = case.make_call((40, 16), FLOAT32, device)
    whole = call.replace(**{name: windows(t).contiguous() for name, t in call.activations.items()})
    changed = relaid(whole, **{name: windows(t) for name, t in call.activations.items()})
    assert_same_bits(evaluate(case.memopt, changed), evaluate(case.memopt, whole))
