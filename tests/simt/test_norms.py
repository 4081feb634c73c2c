"""RMSNorm's CUDA kernels, and either norm's behind an addition and behind dropout and an addition,
run by the interpreter: what test_layer_norm.py proves of LayerNorm's, whose row kernels they share.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support.bits import assert_same_bits
from tests.support.cases import (
    ADD_NORM_CASES,
    ALL_DROPOUT_ADD_NORM_CASES,
    RMS_NORM_CASES,
    OpCase,
)
from tests.support.selection import pairwise
from tests.support.shapes import BFLOAT16, DTYPES, FLOAT32, FLOAT64, STATISTICS, Dtypes

from . import kernels
from .agreement import assert_accurate, path, run, run_in_every_order
from .device import Attribute, Device
from .kernels import DENSE, Layout

CPU = torch.device("cpu")
CASES = (*RMS_NORM_CASES, *ADD_NORM_CASES)
WITH_DROPOUT_TOO = (*CASES, *ALL_DROPOUT_ADD_NORM_CASES)

every_case = pytest.mark.parametrize("case", WITH_DROPOUT_TOO, ids=str)
every_case_without_dropout = pytest.mark.parametrize("case", CASES, ids=str)
every_add_case = pytest.mark.parametrize("case", ADD_NORM_CASES, ids=str)
every_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=str)
a_dtype_of_each_size = pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16, FLOAT64], ids=str)
a_wide_and_a_narrow_dtype = pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16], ids=str)


@every_case
@every_dtype
@pytest.mark.parametrize("cols", [1, 3, 128, 129, 769])
def test_accurate_for_every_length_of_row(
    simt: Device, case: OpCase, dtypes: Dtypes, cols: int
) -> None:
    call = case.make_call((5, cols), dtypes, CPU)
    assert_accurate(case, call, run_in_every_order(simt, case, call))


@every_case
@a_wide_and_a_narrow_dtype
@pytest.mark.parametrize(("rows", "cols"), [(0, 37), (1, 3), (131, 3), (2, 200), (33, 515)])
def test_accurate_for_every_number_of_rows(
    simt: Device, case: OpCase, dtypes: Dtypes, rows: int, cols: int
) -> None:
    call = case.make_call((rows, cols), dtypes, CPU)
    assert_accurate(case, call, run_in_every_order(simt, case, call))


@pytest.mark.parametrize(
    ("case", "dtypes", "shared_bytes"),
    pairwise(WITH_DROPOUT_TOO, (FLOAT32, BFLOAT16, FLOAT64), (96 * 1024, 4 * 1024)),
    ids=str,
)
def test_long_rows(simt: Device, case: OpCase, dtypes: Dtypes, shared_bytes: int) -> None:
    """Staged in shared memory, and read again; more than one row to a block."""
    for offset in (9, 8) if case.random else (9,):
        simt.reset()
        simt.set_attribute(Attribute.SHARED_BYTES_PER_BLOCK, shared_bytes)
        simt.set_attribute(Attribute.MULTIPROCESSORS, 1)
        call = case.make_call((3, 32768 // dtypes.tensor.itemsize + offset), dtypes, CPU)
        assert_accurate(case, call, run(simt, case, call))
        assert path(simt)[:2] == ["norm_forward_long", "norm_backward_long"]


@every_case_without_dropout
@a_wide_and_a_narrow_dtype
@pytest.mark.parametrize("name", STATISTICS)
def test_extreme_statistics(simt: Device, case: OpCase, dtypes: Dtypes, name: str) -> None:
    call = case.make_call((3, 127), dtypes, CPU, values=STATISTICS[name](3, 127))
    assert_accurate(case, call, run_in_every_order(simt, case, call))


@every_case
@a_wide_and_a_narrow_dtype
@pytest.mark.parametrize(("weight", "bias"), [(True, False), (False, True), (False, False)])
def test_parameters_may_be_missing(
    simt: Device, case: OpCase, dtypes: Dtypes, weight: bool, bias: bool
) -> None:
    call = case.make_call((5, 128), dtypes, CPU, weight=weight, bias=bias)
    assert_accurate(case, call, run_in_every_order(simt, case, call))


@every_case
@a_dtype_of_each_size
@pytest.mark.parametrize("cols", [129, 520])
@pytest.mark.parametrize(
    "layout", [Layout(offset=1), Layout(row_gap=16), Layout(offset=3, row_gap=5)], ids=str
)
def test_same_bits_wherever_the_tensors_lie(
    simt: Device, case: OpCase, dtypes: Dtypes, cols: int, layout: Layout
) -> None:
    call = case.make_call((5, cols), dtypes, CPU)
    elsewhere = run(simt, case, call, layout=layout)
    assert_same_bits(elsewhere, run(simt, case, call), str(layout))


@every_case_without_dropout
@a_wide_and_a_narrow_dtype
def test_rows_do_not_depend_on_each_other(simt: Device, case: OpCase, dtypes: Dtypes) -> None:
    call = case.make_call((9, 200), dtypes, CPU)
    whole = run(simt, case, call)
    spoilt = call.map(torch.clone)
    spoilt.input[3] = float("nan")
    simt.set_attribute(Attribute.MULTIPROCESSORS, 132)
    outcome = run(simt, case, spoilt)
    kept = [row for row in range(9) if row != 3]
    for name in (*case.outputs, "rstd", "grad_input", "reemitted_output"):
        assert_same_bits([outcome[name][kept]], [whole[name][kept]], f"{name} beside NaN")
        assert outcome[name][3].isnan().all()


@pytest.mark.parametrize(
    ("case", "cols"),
    [*((case, 520) for case in WITH_DROPOUT_TOO), *((c, 8200) for c in ALL_DROPOUT_ADD_NORM_CASES)],
    ids=str,
)
def test_any_subset_of_results_has_the_same_bits(simt: Device, case: OpCase, cols: int) -> None:
    call = case.make_call((3, cols), FLOAT32, CPU)
    everything = run(simt, case, call)
    names = [f"grad_{name}" for name in case.masked]
    masks = list(itertools.product((False, True), repeat=len(names)))
    if cols > 520:  # by the kernel of long rows: each result alone, and all
        masks = [mask for mask in masks if sum(mask) in (1, len(names))]
    for mask in masks:
        for recompute in (False, True):
            some = kernels.backward(simt, case, call, everything.saved, mask, recompute)
            wanted = {**dict(zip(names, mask, strict=True)), "output": recompute}
            for name, is_wanted in wanted.items():
                expected = everything[name] if is_wanted else None
                assert_same_bits([some[name]], [expected], f"{name}, mask {mask}")


@every_case
@every_dtype
@pytest.mark.parametrize("cols", [129, 520])
def test_in_place_backward_has_the_same_bits(
    simt: Device, case: OpCase, dtypes: Dtypes, cols: int
) -> None:
    call = case.make_call((5, cols), dtypes, CPU)
    apart = run(simt, case, call)
    in_place = kernels.backward(simt, case, call, apart.saved, in_place=True)
    for name in {"grad_input", "grad_residual"} & in_place.keys():
        assert_same_bits([in_place[name]], [apart[name]], f"{name} in place")


@every_case
@a_wide_and_a_narrow_dtype
@pytest.mark.parametrize("cols", [515, 16400])
def test_output_without_statistics_has_the_same_bits(
    simt: Device, case: OpCase, dtypes: Dtypes, cols: int
) -> None:
    call = case.make_call((5, cols), dtypes, CPU)
    outputs, _ = kernels.forward(simt, case, call, statistics=False)
    with_statistics, _ = kernels.forward(simt, case, call)
    assert_same_bits(outputs, with_statistics, "without statistics")


@every_add_case
@every_dtype
@pytest.mark.parametrize("cols", [129, 520])
def test_equal_to_the_norm_of_the_sum(
    simt: Device, case: OpCase, dtypes: Dtypes, cols: int
) -> None:
    """Forward, and backward where the sum has no gradient of its own: in bits."""
    call = case.make_call((5, cols), dtypes, CPU).replace(grad_sum=None)
    outputs, saved = kernels.forward(simt, case, call)
    assert torch.equal(outputs["sum"], call.input + call.residual)
    inner = case._norm_call(call, outputs["sum"])
    output, statistics = kernels.forward(simt, case.norm, inner)
    assert_same_bits([outputs["output"]], [output["output"]], "output")
    ours = kernels.backward(simt, case, call, saved)
    norms = kernels.backward(simt, case.norm, inner, statistics)
    for name, gradient in norms.items():
        assert_same_bits([ours[name]], [gradient], name)


def test_weight_gradients_take_a_second_kernel(simt: Device) -> None:
    """One row of blocks for RMSNorm, which has no bias; two for LayerNorm."""
    for case, rows_of_blocks in ((CASES[0], 1), (ADD_NORM_CASES[0], 2)):
        simt.reset()
        run(simt, case, case.make_call((5, 100), FLOAT32, CPU), layout=DENSE)
        assert path(simt)[-1] == "norm_reduce_parts_kernel"
        assert simt.launches()[-1].grid == (4, rows_of_blocks, 1)
