"""Proves: the output that a backward op re-emits has forward's bits, and asking for it changes no
bit of the gradients. Later layers rest on this: a Linear's weight gradient is the same whether its
input was stored or re-emitted.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support.cases import NORMALIZING_CASES, OP_CASES, VALUE_CASES, Call, OpCase
from tests.support.selection import every_op_with
from tests.support.shapes import (
    COLS,
    DTYPES,
    FLOAT32,
    LAYOUTS,
    ROWS,
    STATISTICS,
    Dtypes,
)

REEMITTING_CASES = [case for case in OP_CASES if case.reemitted]
REEMITTING_VALUES = [case for case in VALUE_CASES if case.reemitted]
every_norm = pytest.mark.parametrize("case", NORMALIZING_CASES, ids=str)
every_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=str)


def assert_reemits(case: OpCase, call: Call, output_mask: tuple[bool, ...] | None = None) -> None:
    outputs, saved = case.forward(call)
    without = case.backward(call, saved, output_mask)
    recomputed = case.backward(call, saved, output_mask, recompute_output=True)
    for name, value in recomputed.items():
        if name in case.reemitted:
            assert without[name] is None
            assert value.dtype == outputs[name].dtype
            assert torch.equal(value, outputs[name]), name
        else:
            assert (value is None) == (without[name] is None), name
            assert value is None or torch.equal(value, without[name]), name


@every_op_with(REEMITTING_VALUES, cols=COLS, dtypes=DTYPES, rows=ROWS)
def test_same_bits(
    case: OpCase, dtypes: Dtypes, rows: int, cols: int, device: torch.device
) -> None:
    assert_reemits(case, case.make_call((rows, cols), dtypes, device))


@every_op_with(REEMITTING_CASES, statistics=list(STATISTICS), dtypes=DTYPES)
def test_same_bits_at_extreme_statistics(
    case: OpCase, dtypes: Dtypes, statistics: str, device: torch.device
) -> None:
    values = STATISTICS[statistics](9, 769)
    assert_reemits(case, case.make_call((9, 769), dtypes, device, values=values))


@every_op_with(REEMITTING_CASES, layout=list(LAYOUTS), dtypes=DTYPES)
def test_same_bits_for_any_layout(
    case: OpCase, dtypes: Dtypes, layout: str, device: torch.device
) -> None:
    call = case.make_call((6, 769), dtypes, device)
    for name, tensor in call.activations.items():
        assert_reemits(case, call.replace(**{name: LAYOUTS[layout](tensor)}))


@every_norm
@every_dtype
@pytest.mark.parametrize(("weight", "bias"), [(True, False), (False, True), (False, False)])
def test_same_bits_without_weight_or_bias(
    case: OpCase, dtypes: Dtypes, weight: bool, bias: bool, device: torch.device
) -> None:
    assert_reemits(case, case.make_call((9, 130), dtypes, device, weight=weight, bias=bias))


@pytest.mark.parametrize("case", [case for case in OP_CASES if case.masked], ids=str)
def test_any_subset_of_gradients(case: OpCase, device: torch.device) -> None:
    """Only what the mask asks for comes back, in the bits that it has when all is asked for."""
    call = case.make_call((67, 130), FLOAT32, device)
    _, saved = case.forward(call)
    everything = case.backward(call, saved)
    for output_mask in itertools.product((True, False), repeat=len(case.masked)):
        some = case.backward(call, saved, output_mask)
        for name, wanted in zip(case.masked, output_mask, strict=True):
            if wanted:
                assert torch.equal(some[f"grad_{name}"], everything[f"grad_{name}"]), name
            else:
                assert some[f"grad_{name}"] is None, name
        assert_reemits(case, call, output_mask)
