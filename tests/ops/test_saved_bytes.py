"""Proves, to the byte, what each op keeps for backward: an activation its input, a gated unit gate
and up, the norms their input and 8 bytes a row (RMSNorm 4), with a residual in front the sum in the
place of the input, what drops elements 16 bytes a call; parameters are alive anyway. PyTorch's pair
of layer_norm and gelu keeps the tensor between them as well.
"""

from __future__ import annotations

import pytest
import torch

from memopt.memory.saved import SavedTensors
from tests.support.cases import (
    ACTIVATION_CASES,
    ACTIVATION_DROPOUT_CASES,
    ADD_NORM_CASES,
    DROPOUT_ADD_NORM_CASES,
    DROPOUT_CASES,
    GATED_CASES,
    GELU_CASES,
    NORM_CASES,
    OP_CASES,
    PACKED_CASES,
    RMS_NORM_CASES,
    Call,
    OpCase,
    as_tuple,
)
from tests.support.selection import every_op_with
from tests.support.shapes import BFLOAT16, COLS, DTYPES, FLOAT32, LAYOUTS, Dtypes

every_op = pytest.mark.parametrize("case", OP_CASES, ids=str)
every_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=str)


def saved_by(function, call: Call) -> SavedTensors:
    leaves = call.leaves()
    with SavedTensors(exclude=leaves.weights.values()) as saved:
        outputs = as_tuple(function(leaves))
    # The hooks must not have hidden an output that autograd would have kept.
    torch.autograd.backward(outputs, list(call.incoming.values()))
    return saved


@every_op_with(OP_CASES, cols=COLS, dtypes=DTYPES)
def test_what_each_op_says_it_keeps_is_all(
    case: OpCase, dtypes: Dtypes, cols: int, device: torch.device
) -> None:
    rows = 67
    call = case.make_call((rows, cols), dtypes, device)
    expected = case.saved_bytes(call)
    kept = " + ".join(f"{name} {getattr(call, name).nbytes} B" for name in case.kept)
    print(f"{case}, {dtypes}: {kept} + statistics {case.statistics_bytes(call)} B = {expected} B")
    assert saved_by(case.memopt, call).bytes == expected


@every_op
def test_the_input_itself_is_kept_and_no_copy_of_it(case: OpCase, device: torch.device) -> None:
    for layout in LAYOUTS.values():
        call = case.make_call((6, 10, 129), FLOAT32, device)
        call = call.replace(**{name: layout(t) for name, t in call.activations.items()})
        saved = saved_by(case.memopt, call)
        storages = {t.untyped_storage().data_ptr() for t in saved.tensors}
        assert {getattr(call, name).untyped_storage().data_ptr() for name in case.kept} <= storages
        assert saved.bytes == case.saved_bytes(call)


@every_op
def test_nothing_is_kept_without_grad(case: OpCase, device: torch.device) -> None:
    call = case.make_call((6, 130), FLOAT32, device)
    with SavedTensors() as saved:
        case.memopt(call)
        with torch.no_grad():
            case.memopt(call.leaves())
    assert saved.tensors == []


@pytest.mark.parametrize(
    ("case", "bytes_of_an_element", "bytes_of_a_row"),
    [
        *((case, 2, 0) for case in ACTIVATION_CASES),
        *((case, 4, 0) for case in (*GATED_CASES, *PACKED_CASES)),
        *((case, 2, 8) for case in NORM_CASES),
        *((case, 2, 4) for case in RMS_NORM_CASES),
        (ADD_NORM_CASES[0], 2, 8),
        *((case, 2, 4) for case in ADD_NORM_CASES[1:]),
    ],
    ids=str,
)
def test_bytes_in_bfloat16(
    case: OpCase, bytes_of_an_element: int, bytes_of_a_row: int, device: torch.device
) -> None:
    """The figures of each op's header in csrc/kernels, counted apart from the table of ops."""
    saved = saved_by(case.memopt, case.make_call((67, 130), BFLOAT16, device))
    assert saved.bytes == 67 * (130 * bytes_of_an_element + bytes_of_a_row)


@pytest.mark.parametrize(
    ("case", "bytes_of_an_element", "bytes_of_a_row"),
    [
        (DROPOUT_CASES[0], 0, 0),
        *((case, 2, 0) for case in ACTIVATION_DROPOUT_CASES),
        (DROPOUT_ADD_NORM_CASES[0], 2, 8),
        (DROPOUT_ADD_NORM_CASES[1], 2, 4),
    ],
    ids=str,
)
def test_bytes_in_bfloat16_with_dropout(
    case: OpCase, bytes_of_an_element: int, bytes_of_a_row: int, device: torch.device
) -> None:
    """The same, and 16 bytes a call for the mask."""
    saved = saved_by(case.memopt, case.make_call((67, 130), BFLOAT16, device))
    assert saved.bytes == 67 * (130 * bytes_of_an_element + bytes_of_a_row) + 16


@pytest.mark.parametrize("case", NORM_CASES[1:], ids=str)
@every_dtype
def test_the_normalized_tensor_is_what_pytorch_keeps_beyond_that(
    case: OpCase, dtypes: Dtypes
) -> None:
    call = case.make_call((67, 769), dtypes, torch.device("cpu"))
    ours, torchs = saved_by(case.memopt, call), saved_by(case.torch, call)
    normalized = call.input.nbytes
    # PyTorch on the CPU keeps statistics in the dtype of the parameters.
    torchs_statistics = 67 * 2 * dtypes.parameter.itemsize
    assert torchs.bytes == 2 * normalized + torchs_statistics
    assert torchs.bytes - ours.bytes == (
        normalized + torchs_statistics - case.statistics_bytes(call)
    )


@pytest.mark.parametrize("case", GELU_CASES, ids=str)
def test_gelu_keeps_no_more_than_pytorchs(case: OpCase, device: torch.device) -> None:
    call = case.make_call((67, 769), FLOAT32, device)
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
