"""Proves: results have the same bits from run to run, for every number of threads, and whatever the
rest of the batch is; a row's result is that of the row alone.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.bits import assert_same_bits
from tests.support.cases import (
    NORMALIZING_CASES,
    OP_CASES,
    Call,
    OpCase,
    Results,
    as_tuple,
    evaluate,
)
from tests.support.selection import every_op_with
from tests.support.shapes import BFLOAT16, DTYPES, FLOAT32, Dtypes, misaligned

every_op = pytest.mark.parametrize("case", OP_CASES, ids=str)
every_op_of_independent_rows = pytest.mark.parametrize(
    "case", [case for case in OP_CASES if case.rows_are_independent], ids=str
)
every_elementwise_op = pytest.mark.parametrize(
    "case", [case for case in OP_CASES if case.elementwise], ids=str
)
every_norm = pytest.mark.parametrize("case", NORMALIZING_CASES, ids=str)
float32_and_bfloat16 = pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16], ids=str)


def rows_of(call: Call, begin: int, end: int) -> Call:
    """The same call on some of its rows, in memory of their own."""
    return call.map_activations(lambda t: t[begin:end].clone())


def assert_rows_are(part: Results, whole: Results, call: Call, rows: slice) -> None:
    """Outputs and gradients of activations in `part` have the bits of these rows of `whole`."""
    weights = {f"grad_{name}" for name in call.parameters}
    for name, value in whole.items():
        if value is not None and name not in weights:
            assert torch.equal(part[name], value[rows]), name


@every_op
@float32_and_bfloat16
def test_run_to_run(case: OpCase, dtypes: Dtypes, device: torch.device) -> None:
    call = case.make_call((500, 769), dtypes, device)
    first = evaluate(case.memopt, call)
    for _ in range(3):
        assert_same_bits(evaluate(case.memopt, call), first)


@every_op_with(OP_CASES, size=[(500, 769), (3, 40000), (20000, 7)], dtypes=[FLOAT32, BFLOAT16])
def test_number_of_threads(
    case: OpCase, dtypes: Dtypes, size: tuple[int, int], restore_num_threads: None
) -> None:
    """Sizes that two and three threads cut into ranges at different places."""
    call = case.make_call(size, dtypes, torch.device("cpu"))
    torch.set_num_threads(1)
    expected = evaluate(case.memopt, call)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert_same_bits(evaluate(case.memopt, call), expected)


@every_op_with(
    [case for case in OP_CASES if case.rows_are_independent], dtypes=DTYPES, cols=[3, 129, 1000]
)
def test_a_row_is_the_row_alone(
    case: OpCase, dtypes: Dtypes, cols: int, device: torch.device
) -> None:
    call = case.make_call((37, cols), dtypes, device)
    batch = evaluate(case.memopt, call)
    for row in (0, 1, 2, 3, 31, 32, 35, 36):
        alone = evaluate(case.memopt, rows_of(call, row, row + 1))
        assert_rows_are(alone, batch, call, slice(row, row + 1))


@every_op_of_independent_rows
@float32_and_bfloat16
def test_a_row_does_not_depend_on_the_size_of_the_batch(
    case: OpCase, dtypes: Dtypes, device: torch.device
) -> None:
    """From one row to many parts of rows, a multiple of nothing."""
    call = case.make_call((4500, 33), dtypes, device)
    whole = evaluate(case.memopt, call)
    for rows in (1, 2, 5, 33, 1025):
        part = evaluate(case.memopt, rows_of(call, 0, rows))
        assert_rows_are(part, whole, call, slice(rows))


@every_norm
@float32_and_bfloat16
def test_statistics_are_those_of_the_row_alone(
    case: OpCase, dtypes: Dtypes, device: torch.device
) -> None:
    call = case.make_call((37, 1000), dtypes, device)
    _, batch = case.forward(call)
    for row in (0, 17, 36):
        _, alone = case.forward(rows_of(call, row, row + 1))
        for name, value in batch.items():
            assert torch.equal(alone[name], value[row : row + 1]), name


@every_op_with(OP_CASES, elements=[1, 3, 8, 16, 63], dtypes=[FLOAT32, BFLOAT16])
def test_alignment(case: OpCase, dtypes: Dtypes, elements: int, device: torch.device) -> None:
    """Each tensor in turn begins `elements` elements past an aligned address; the others are
    aligned.
    """
    call = case.make_call((37, 1000), dtypes, device)
    expected = evaluate(case.memopt, call)
    for name, tensor in {**call.given, **call.incoming}.items():
        moved = call.replace(**{name: misaligned(tensor, elements)})
        assert_same_bits(evaluate(case.memopt, moved), expected)


@every_op
def test_without_grad_the_output_has_the_same_bits(case: OpCase, device: torch.device) -> None:
    call = case.make_call((37, 1000), BFLOAT16, device)
    with torch.no_grad():
        outputs = as_tuple(case.memopt(call))
    results = evaluate(case.memopt, call)
    for name, output in zip(case.outputs, outputs, strict=True):
        assert torch.equal(output, results[name]), name


@every_elementwise_op
@float32_and_bfloat16
def test_result_of_an_element_does_not_depend_on_its_place(
    case: OpCase, dtypes: Dtypes, device: torch.device
) -> None:
    """Vector lanes and scalar tails give the same value."""
    call = case.make_call((1, 301), dtypes, device)
    whole = evaluate(case.memopt, call)
    part = evaluate(case.memopt, call.map(lambda t: t[:, 1:].clone()))
    for name, value in part.items():
        assert torch.equal(value, whole[name][:, 1:]), name
