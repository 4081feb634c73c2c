"""Proves: on random calls (shapes, normalised dimensions, strides, offsets, dtypes,
values) every op is accurate, re-emits its output and leaves its arguments alone. hypothesis shrinks
what fails.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from tests.support.cases import OP_CASES, Call, OpCase
from tests.support.oracle import assert_accurate
from tests.support.shapes import DTYPES, misaligned, random_normal


@st.composite
def relaid(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    """An equal tensor with other strides: dimensions permuted in memory, gaps, an offset."""
    order = draw(st.permutations(range(tensor.dim())))
    inverse = [order.index(d) for d in range(tensor.dim())]
    steps = [draw(st.integers(1, 2)) for _ in order]
    permuted = tensor.permute(order)
    sizes = [n * step for n, step in zip(permuted.shape, steps, strict=True)]
    buffer = misaligned(tensor.new_full(sizes, float("nan")), draw(st.integers(0, 3)))
    view = buffer[tuple(slice(None, None, step) for step in steps)]
    return view.copy_(permuted).permute(inverse)


@st.composite
def calls(draw: st.DrawFn, case: OpCase, device: torch.device) -> Call:
    size = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    if len(size) > 1 and draw(st.booleans()):
        size = (0, *size[1:])
    mean = draw(st.sampled_from([0.0, -3.0, 1e2, 1e4]))
    std = draw(st.sampled_from([1.0, 1e-3, 1e2, 0.0]))
    call = case.make_call(
        size,
        draw(st.sampled_from(DTYPES)),
        device,
        values=random_normal(*size, seed=draw(st.integers(0, 1000))) * std + mean,
        **case.random_choices(draw, size),
    )
    return call.map(lambda t: draw(relaid(t)))


@pytest.mark.parametrize("case", OP_CASES, ids=str)
@given(data=st.data())
def test_random_calls(case: OpCase, device: torch.device, data: st.DataObject) -> None:
    call = data.draw(calls(case, device))
    copy = call.map(torch.Tensor.clone)
    assert_accurate(case, call)
    outputs, saved = case.forward(call)
    again = case.backward(call, saved, recompute_output=True)
    for name in case.reemitted:
        assert torch.equal(again[name], outputs[name]), name
    for name, tensor in {**call.given, **call.incoming}.items():
        assert torch.equal(tensor, getattr(copy, name)), name
