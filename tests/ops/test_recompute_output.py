"""Proves: the output that a backward op re-emits has forward's bits, and asking for it changes no
bit of the gradients. Later layers rest on this: a Linear's weight gradient is the same whether its
input was stored or re-emitted.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support.cases import NORM_CASES, OP_CASES, OpCase
from tests.support.shapes import (
    COLS,
    DTYPES,
    FLOAT32,
    LAYOUTS,
    ROWS,
    STATISTICS,
    Dtypes,
    make_call,
)

every_op = pytest.mark.parametrize("case", OP_CASES, ids=str)
every_norm = pytest.mark.parametrize("case", NORM_CASES, ids=str)
every_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=str)


def assert_reemits(case: OpCase, call, output_mask=None) -> None:
    output, statistics = case.forward(call)
    without = case.backward(call, statistics, output_mask)
    recomputed = case.backward(call, statistics, output_mask, recompute_output=True)
    assert without.output is None
    assert recomputed.output is not None
    assert recomputed.output.dtype == output.dtype
    assert recomputed.output.shape == output.shape
    assert torch.equal(recomputed.output, output)
    for name in ("grad_input", "grad_weight", "grad_bias"):
        a, b = getattr(without, name), getattr(recomputed, name)
        assert (a is None) == (b is None), name
        assert a is None or torch.equal(a, b), name


@every_op
@every_dtype
@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("rows", ROWS)
def test_same_bits(
    case: OpCase, dtypes: Dtypes, rows: int, cols: int, device: torch.device
) -> None:
    assert_reemits(case, make_call(case, (rows, cols), dtypes, device))


@every_op
@every_dtype
@pytest.mark.parametrize("statistics", STATISTICS)
def test_same_bits_at_extreme_statistics(
    case: OpCase, dtypes: Dtypes, statistics: str, device: torch.device
) -> None:
    values = STATISTICS[statistics](9, 769)
    assert_reemits(case, make_call(case, (9, 769), dtypes, device, values=values))


@every_op
@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_bits_for_any_layout(
    case: OpCase, dtypes: Dtypes, layout: str, device: torch.device
) -> None:
    call = make_call(case, (6, 769), dtypes, device)
    call = dataclasses.replace(call, input=LAYOUTS[layout](call.input))
    assert_reemits(case, call)


@every_norm
@every_dtype
@pytest.mark.parametrize(("weight", "bias"), [(True, False), (False, True), (False, False)])
def test_same_bits_without_weight_or_bias(
    case: OpCase, dtypes: Dtypes, weight: bool, bias: bool, device: torch.device
) -> None:
    assert_reemits(case, make_call(case, (9, 130), dtypes, device, weight=weight, bias=bias))


@every_norm
@pytest.mark.parametrize(
    "output_mask",
    [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)],
    ids=str,
)
def test_any_subset_of_gradients(
    case: OpCase, output_mask: tuple[bool, bool, bool], device: torch.device
) -> None:
    """Only what the mask asks for comes back, in the bits that it has when all is asked for."""
    call = make_call(case, (67, 130), FLOAT32, device)
    _, statistics = case.forward(call)
    everything = case.backward(call, statistics, (True, True, True))
    some = case.backward(call, statistics, output_mask)
    for name, wanted in zip(("grad_input", "grad_weight", "grad_bias"), output_mask, strict=True):
        if wanted:
            assert torch.equal(getattr(some, name), getattr(everything, name)), name
        else:
            assert getattr(some, name) is None, name
    assert_reemits(case, call, output_mask)
