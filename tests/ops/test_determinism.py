"""Proves: results have the same bits from run to run, for every number of threads, and whatever the
rest of the batch is; a row's result is that of the row alone.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support.cases import NORM_CASES, OP_CASES, Call, OpCase, Results, evaluate
from tests.support.shapes import BFLOAT16, DTYPES, FLOAT32, Dtypes, make_call, misaligned

every_op = pytest.mark.parametrize("case", OP_CASES, ids=str)
every_norm = pytest.mark.parametrize("case", NORM_CASES, ids=str)
every_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=str)
float32_and_bfloat16 = pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16], ids=str)


def assert_same_bits(actual: Results, expected: Results) -> None:
    for name, value in expected._asdict().items():
        if value is not None:
            assert torch.equal(getattr(actual, name), value), name


def rows_of(call: Call, begin: int, end: int) -> Call:
    """The same call on some of its rows, in memory of their own."""
    return dataclasses.replace(
        call,
        input=call.input[begin:end].clone(),
        grad_output=call.grad_output[begin:end].clone(),
    )


@every_op
@float32_and_bfloat16
def test_run_to_run(case: OpCase, dtypes: Dtypes, device: torch.device) -> None:
    call = make_call(case, (500, 769), dtypes, device)
    first = evaluate(case.memopt, call)
    for _ in range(3):
        assert_same_bits(evaluate(case.memopt, call), first)


@every_op
@float32_and_bfloat16
@pytest.mark.parametrize("size", [(500, 769), (3, 40000), (20000, 7)], ids=str)
def test_number_of_threads(
    case: OpCase, dtypes: Dtypes, size: tuple[int, int], restore_num_threads: None
) -> None:
    """Sizes that two and three threads cut into ranges at different places."""
    call = make_call(case, size, dtypes, torch.device("cpu"))
    torch.set_num_threads(1)
    expected = evaluate(case.memopt, call)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert_same_bits(evaluate(case.memopt, call), expected)


@every_op
@every_dtype
@pytest.mark.parametrize("cols", [3, 129, 1000])
def test_a_row_is_the_row_alone(
    case: OpCase, dtypes: Dtypes, cols: int, device: torch.device
) -> None:
    call = make_call(case, (37, cols), dtypes, device)
    batch = evaluate(case.memopt, call)
    for row in (0, 1, 2, 3, 31, 32, 35, 36):
        alone = evaluate(case.memopt, rows_of(call, row, row + 1))
        assert torch.equal(alone.output, batch.output[row : row + 1])
        assert torch.equal(alone.grad_input, batch.grad_input[row : row + 1])


@every_op
@float32_and_bfloat16
def test_a_row_does_not_depend_on_the_size_of_the_batch(
    case: OpCase, dtypes: Dtypes, device: torch.device
) -> None:
    """From one row to many parts of rows, a multiple of nothing."""
    call = make_call(case, (4500, 33), dtypes, device)
    whole = evaluate(case.memopt, call)
    for rows in (1, 2, 5, 33, 1025):
        part = evaluate(case.memopt, rows_of(call, 0, rows))
        assert torch.equal(part.output, whole.output[:rows])
        assert torch.equal(part.grad_input, whole.grad_input[:rows])


@every_norm
@float32_and_bfloat16
def test_statistics_are_those_of_the_row_alone(
    case: OpCase, dtypes: Dtypes, device: torch.device
) -> None:
    call = make_call(case, (37, 1000), dtypes, device)
    _, batch = case.forward(call)
    for row in (0, 17, 36):
        _, alone = case.forward(rows_of(call, row, row + 1))
        assert torch.equal(alone.mean, batch.mean[row : row + 1])
        assert torch.equal(alone.rstd, batch.rstd[row : row + 1])


@every_op
@float32_and_bfloat16
@pytest.mark.parametrize("elements", [1, 3, 8, 16, 63])
def test_alignment(case: OpCase, dtypes: Dtypes, elements: int, device: torch.device) -> None:
    """Each tensor in turn begins `elements` elements past an aligned address; the others are
    aligned.
    """
    call = make_call(case, (37, 1000), dtypes, device)
    expected = evaluate(case.memopt, call)
    for name in ("input", "weight", "bias", "grad_output"):
        if getattr(call, name) is not None:
            moved = dataclasses.replace(call, **{name: misaligned(getattr(call, name), elements)})
            assert_same_bits(evaluate(case.memopt, moved), expected)


@every_norm
def test_without_grad_the_output_has_the_same_bits(case: OpCase, device: torch.device) -> None:
    call = make_call(case, (37, 1000), BFLOAT16, device)
    with torch.no_grad():
        without = case.memopt(call)
    assert torch.equal(without, evaluate(case.memopt, call).output)


@pytest.mark.parametrize("case", OP_CASES[:2], ids=str)
@float32_and_bfloat16
def test_gelu_of_an_element_does_not_depend_on_its_place(
    case: OpCase, dtypes: Dtypes, device: torch.device
) -> None:
    """Vector lanes and scalar tails give the same value."""
    call = make_call(case, (1, 301), dtypes, device)
    whole = evaluate(case.memopt, call)
    shifted = dataclasses.replace(
        call, input=call.input[:, 1:].clone(), grad_output=call.grad_output[:, 1:].clone()
    )
    part = evaluate(case.memopt, shifted)
    assert torch.equal(part.output, whole.output[:, 1:])
    assert torch.equal(part.grad_input, whole.grad_input[:, 1:])
