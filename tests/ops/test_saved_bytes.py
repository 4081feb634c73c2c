"""Proves, to the byte, what each op keeps for backward: gelu its input, the norms their input and 8
bytes a row; parameters are alive anyway. PyTorch's pair of layer_norm and gelu keeps the tensor
between them as well.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support.cases import GELU_CASES, NORM_CASES, OP_CASES, Call, OpCase
from tests.support.saved_bytes import SavedTensors
from tests.support.shapes import COLS, DTYPES, FLOAT32, LAYOUTS, Dtypes, make_call

every_op = pytest.mark.parametrize("case", OP_CASES, ids=str)
every_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=str)


def saved_by(function, call: Call) -> SavedTensors:
    leaves = call.leaves()
    parameters = [t for t in (leaves.weight, leaves.bias) if t is not None]
    with SavedTensors(exclude=parameters) as saved:
        output = function(leaves)
    # The hooks must not have hidden an output that autograd would have kept.
    output.backward(call.grad_output)
    return saved


def statistics_bytes(case: OpCase, rows: int, dtype: torch.dtype) -> int:
    """Mean and rstd of each row: two float32, two float64 for float64."""
    if not case.normalizes:
        return 0
    return rows * 2 * (8 if dtype == torch.float64 else 4)


@every_op
@every_dtype
@pytest.mark.parametrize("cols", COLS)
def test_input_and_statistics_are_all(
    case: OpCase, dtypes: Dtypes, cols: int, device: torch.device
) -> None:
    rows = 67
    saved = saved_by(case.memopt, make_call(case, (rows, cols), dtypes, device))
    element = dtypes.tensor.itemsize
    expected = rows * cols * element + statistics_bytes(case, rows, dtypes.tensor)
    formula = f"{element} B x {cols} + {statistics_bytes(case, 1, dtypes.tensor)} B"
    print(f"{case}, {dtypes}: {formula} a row, {expected} bytes for {rows} rows")
    assert saved.bytes == expected


@every_op
def test_the_input_itself_is_kept_and_no_copy_of_it(case: OpCase, device: torch.device) -> None:
    for layout in LAYOUTS.values():
        call = make_call(case, (6, 10, 129), FLOAT32, device)
        call = dataclasses.replace(call, input=layout(call.input))
        saved = saved_by(case.memopt, call)
        storages = {t.untyped_storage().data_ptr() for t in saved.tensors}
        assert call.input.untyped_storage().data_ptr() in storages
        extra = saved.bytes - call.input.untyped_storage().nbytes()
        assert extra == statistics_bytes(case, 60, torch.float32)


@every_op
def test_nothing_is_kept_without_grad(case: OpCase, device: torch.device) -> None:
    call = make_call(case, (6, 130), FLOAT32, device)
    with SavedTensors() as saved:
        case.memopt(call)
        with torch.no_grad():
            case.memopt(call.leaves())
    assert saved.tensors == []


@pytest.mark.parametrize("case", NORM_CASES[1:], ids=str)
@every_dtype
def test_the_normalized_tensor_is_what_pytorch_keeps_beyond_that(
    case: OpCase, dtypes: Dtypes
) -> None:
    call = make_call(case, (67, 769), dtypes, torch.device("cpu"))
    ours, torchs = saved_by(case.memopt, call), saved_by(case.torch, call)
    normalized = call.input.nbytes
    # PyTorch on the CPU keeps statistics in the dtype of the parameters.
    torchs_statistics = 67 * 2 * dtypes.parameter.itemsize
    assert torchs.bytes == 2 * normalized + torchs_statistics
    assert torchs.bytes - ours.bytes == (
        normalized + torchs_statistics - statistics_bytes(case, 67, dtypes.tensor)
    )


@pytest.mark.parametrize("case", GELU_CASES, ids=str)
def test_gelu_keeps_no_more_than_pytorchs(case: OpCase, device: torch.device) -> None:
    call = make_call(case, (67, 769), FLOAT32, device)
    assert saved_by(case.memopt, call).bytes == saved_by(case.torch, call).bytes


def test_the_counter_counts_a_storage_once() -> None:
    """The measuring stick itself: aliases once, views whole, parameters not at all."""
    x = torch.randn(4, 8, requires_grad=True)
    parameter = torch.randn(8, requires_grad=True)
    with SavedTensors(exclude=[parameter]) as saved:
        _ = (x * x).sum() + (x[:, :2] * x[:, 2:4]).sum() + (x * parameter).sum()
    assert saved.bytes == x.nbytes
    with SavedTensors() as saved:
        _ = x.exp()
    assert saved.bytes == x.nbytes
