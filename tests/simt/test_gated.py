"""The gated units' CUDA kernels, run by the interpreter.

They are accurate for every type and size, of two tensors, of halves and of alternating elements,
with gaps between the rows and off alignment, in every order of threads; backward re-emits forward's
bits, leaves out what is not wanted, and writes over grad_output if asked.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.bits import assert_same_bits
from tests.support.cases import FURTHER_GATED_CASES, GATED_CASES, PACKED_CASES, OpCase, Results
from tests.support.selection import every_op_with
from tests.support.shapes import FLOAT32, Dtypes

from . import kernels
from .agreement import assert_accurate, path, run, run_in_every_order
from .device import Device
from .kernels import Layout

CPU = torch.device("cpu")

DTYPES = tuple(
    Dtypes(dtype, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)
)
# One of each arrangement.
ARRANGEMENTS = (GATED_CASES[0], *PACKED_CASES[:2])

every_case = pytest.mark.parametrize("case", [*GATED_CASES, *PACKED_CASES], ids=str)
every_arrangement = pytest.mark.parametrize("case", ARRANGEMENTS, ids=str)
every_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=str)


@every_case
@every_dtype
@pytest.mark.parametrize("cols", [1, 3, 129, 256])
def test_accurate_for_every_size(simt: Device, case: OpCase, dtypes: Dtypes, cols: int) -> None:
    call = case.make_call((3, cols), dtypes, CPU)
    assert_accurate(case, call, run_in_every_order(simt, case, call))


@every_op_with(FURTHER_GATED_CASES, dtypes=DTYPES[:3], cols=[129])
def test_accurate_for_further_functions(
    simt: Device, case: OpCase, dtypes: Dtypes, cols: int
) -> None:
    call = case.make_call((3, cols), dtypes, CPU)
    assert_accurate(case, call, run_in_every_order(simt, case, call))


@every_arrangement
@every_dtype
@pytest.mark.parametrize("size", [(1, 4099), (2, 4104), (300, 2)], ids=str)
def test_accurate_for_long_rows_and_many(
    simt: Device, case: OpCase, dtypes: Dtypes, size: tuple[int, int]
) -> None:
    call = case.make_call(size, dtypes, CPU)
    assert_accurate(case, call, run(simt, case, call))
    assert path(simt) == ["gated_forward_kernel", "gated_backward_kernel"]


@every_arrangement
@pytest.mark.parametrize(
    ("cols", "block"),
    [(1, (1, 256)), (8, (1, 256)), (9, (2, 128)), (256, (32, 8)), (5000, (256, 1))],
)
def test_block_has_as_many_threads_as_the_row_needs(
    simt: Device, case: OpCase, cols: int, block: tuple[int, int]
) -> None:
    """8 elements to a thread in float32."""
    kernels.forward(simt, case, case.make_call((1, cols), FLOAT32, CPU))
    assert simt.launches()[-1].block == (*block, 1)
    assert simt.launches()[-1].stream == kernels.STREAM


@every_arrangement
@every_dtype
@pytest.mark.parametrize("cols", [128, 133])
@pytest.mark.parametrize(
    "layout", [Layout(offset=1), Layout(row_gap=3), Layout(row_gap=16), Layout(2, None, 8)], ids=str
)
def test_same_bits_wherever_the_tensors_lie(
    simt: Device, case: OpCase, dtypes: Dtypes, cols: int, layout: Layout
) -> None:
    call = case.make_call((5, cols), dtypes, CPU)
    assert_same_bits(
        run_in_every_order(simt, case, call, layout=layout), run(simt, case, call), str(layout)
    )


@pytest.mark.parametrize("case", GATED_CASES, ids=str)
@every_dtype
@pytest.mark.parametrize("recompute_output", [False, True])
def test_in_place_backward_has_the_same_bits(
    simt: Device, case: OpCase, dtypes: Dtypes, recompute_output: bool
) -> None:
    call = case.make_call((5, 131), dtypes, CPU)
    apart = run(simt, case, call)
    in_place = kernels.in_every_order(
        simt,
        lambda: kernels.backward(
            simt, case, call, {}, recompute_output=recompute_output, in_place=True
        ),
    )
    output = apart.output if recompute_output else None
    assert_same_bits(in_place, Results({**apart.results, "output": output}), "in place")


@pytest.mark.parametrize("case", GATED_CASES, ids=str)
@pytest.mark.parametrize("mask", [(True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("recompute_output", [False, True])
def test_any_subset_of_results_has_the_same_bits(
    simt: Device, case: OpCase, mask: tuple[bool, bool], recompute_output: bool
) -> None:
    """Without the gradient of gate and the output, up is not even given."""
    call = case.make_call((5, 131), FLOAT32, CPU)
    everything = run(simt, case, call)
    some = kernels.backward(simt, case, call, {}, mask, recompute_output)
    expected = Results(
        output=everything.output if recompute_output else None,
        grad_gate=everything.grad_gate if mask[0] else None,
        grad_up=everything.grad_up if mask[1] else None,
    )
    assert_same_bits(some, expected, f"mask {mask}")


@every_case
def test_nothing_is_launched_for_an_empty_tensor(simt: Device, case: OpCase) -> None:
    for size in ((0, 5), (5, 0)):
        outcome = run(simt, case, case.make_call(size, FLOAT32, CPU))
        assert outcome.output.shape == size
    assert simt.launches() == []
