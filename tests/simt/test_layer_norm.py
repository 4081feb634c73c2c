"""LayerNorm's CUDA kernels, alone and with GELU behind it, run by the interpreter.

They are accurate for every type and length of row, in every order of threads, with one set of bits
whatever the layout, the batch and the mask, and in place; backward re-emits forward's bits. Which
kernel runs for which shape is in test_launches.py.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support.bits import assert_same_bits
from tests.support.cases import NORM_CASES, OpCase, Results
from tests.support.shapes import (
    BFLOAT16,
    DTYPES,
    FLOAT32,
    FLOAT64,
    STATISTICS,
    Dtypes,
    awkward_gamma,
    random_normal,
)

from . import kernels
from .agreement import (
    assert_accurate,
    run,
    run_in_every_order,
)
from .device import Attribute, Device
from .kernels import Layout

CPU = torch.device("cpu")

every_case = pytest.mark.parametrize("case", NORM_CASES, ids=str)
every_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=str)
a_dtype_of_each_size = pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16, FLOAT64], ids=str)
a_wide_and_a_narrow_dtype = pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16], ids=str)


@every_case
@every_dtype
@pytest.mark.parametrize("cols", [1, 3, 127, 128, 129, 769, 1000])
def test_accurate_for_every_length_of_row(
    simt: Device, case: OpCase, dtypes: Dtypes, cols: int
) -> None:
    call = case.make_call((5, cols), dtypes, CPU)
    assert_accurate(case, call, run_in_every_order(simt, case, call))


@every_case
@a_dtype_of_each_size
def test_accurate_for_a_long_row(simt: Device, case: OpCase, dtypes: Dtypes) -> None:
    call = case.make_call((3, 4099), dtypes, CPU)
    assert_accurate(case, call, run_in_every_order(simt, case, call))


@every_case
@a_wide_and_a_narrow_dtype
@pytest.mark.parametrize(
    ("rows", "cols"), [(1, 3), (2, 3), (33, 3), (131, 3), (1, 200), (2, 200), (33, 200), (33, 515)]
)
def test_accurate_for_every_number_of_rows(
    simt: Device, case: OpCase, dtypes: Dtypes, rows: int, cols: int
) -> None:
    """Short rows share a warp or a block, and blocks take several rows each."""
    call = case.make_call((rows, cols), dtypes, CPU)
    assert_accurate(case, call, run_in_every_order(simt, case, call))


@every_case
@every_dtype
def test_no_rows(simt: Device, case: OpCase, dtypes: Dtypes) -> None:
    """Weight gradients of nothing are zeros."""
    outcome = run_in_every_order(simt, case, case.make_call((0, 37), dtypes, CPU))
    assert outcome.output.shape == (0, 37)
    assert outcome.grad_weight is not None
    assert outcome.grad_bias is not None
    assert outcome.grad_weight.eq(0).all()
    assert outcome.grad_bias.eq(0).all()


@every_case
@a_wide_and_a_narrow_dtype
@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("cols", [127, 520])
def test_extreme_statistics(
    simt: Device, case: OpCase, dtypes: Dtypes, name: str, cols: int
) -> None:
    call = case.make_call(
        (3, cols), dtypes, CPU, values=STATISTICS[name](3, cols), gamma=awkward_gamma(cols)
    )
    assert_accurate(case, call, run_in_every_order(simt, case, call))


@every_case
@every_dtype
@pytest.mark.parametrize(("weight", "bias"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("cols", [128, 129])
def test_parameters_may_be_missing(
    simt: Device, case: OpCase, dtypes: Dtypes, weight: bool, bias: bool, cols: int
) -> None:
    call = case.make_call((5, cols), dtypes, CPU, weight=weight, bias=bias)
    assert_accurate(case, call, run_in_every_order(simt, case, call))


@every_case
@a_dtype_of_each_size
@pytest.mark.parametrize("cols", [129, 520])
@pytest.mark.parametrize(
    "layout",
    [Layout(offset=1), Layout(row_gap=16), Layout(offset=3, row_gap=5)],
    ids=str,
)
def test_same_bits_wherever_the_tensors_lie(
    simt: Device, case: OpCase, dtypes: Dtypes, cols: int, layout: Layout
) -> None:
    call = case.make_call((5, cols), dtypes, CPU)
    assert_same_bits(
        run_in_every_order(simt, case, call, layout=layout), run(simt, case, call), str(layout)
    )


@every_case
@a_wide_and_a_narrow_dtype
@pytest.mark.parametrize("cols", [7, 200, 1001])
def test_rows_do_not_depend_on_each_other(
    simt: Device, case: OpCase, dtypes: Dtypes, cols: int
) -> None:
    """Neither on how many there are, nor on the device's size, nor on a NaN in another one."""
    call = case.make_call((9, cols), dtypes, CPU)
    whole = run(simt, case, call)
    spoilt = call.map(torch.clone)
    spoilt.input[3] = float("nan")
    simt.set_attribute(Attribute.MULTIPROCESSORS, 132)
    outcome = run(simt, case, spoilt)
    alone = run(simt, case, call.map(lambda t: t[6:7] if t.dim() == 2 else t))
    for name in ("output", "mean", "rstd", "grad_input", "reemitted_output"):
        all_rows, others, single = (getattr(o, name) for o in (whole, outcome, alone))
        kept = [row for row in range(9) if row != 3]
        assert_same_bits([others[kept]], [all_rows[kept]], f"{name} beside a row of NaN")
        assert_same_bits([single], [all_rows[6:7]], f"{name} of a row alone")
        assert others[3].isnan().all()


@every_case
@pytest.mark.parametrize("mask", list(itertools.product((False, True), repeat=3)), ids=str)
@pytest.mark.parametrize("recompute_output", [False, True])
def test_any_subset_of_results_has_the_same_bits(
    simt: Device,
    case: OpCase,
    mask: tuple[bool, bool, bool],
    recompute_output: bool,
) -> None:
    call = case.make_call((5, 520), FLOAT32, CPU)
    everything = run(simt, case, call)
    some = kernels.in_every_order(
        simt,
        lambda: kernels.backward(simt, case, call, everything.saved, mask, recompute_output),
    )
    wanted = (recompute_output, *mask)
    expected = Results(
        {
            name: everything[name] if is_wanted else None
            for name, is_wanted in zip(everything.results, wanted, strict=True)
        }
    )
    assert_same_bits(some, expected, f"mask {mask}")


@every_case
@every_dtype
@pytest.mark.parametrize("cols", [129, 520])
def test_in_place_backward_has_the_same_bits(
    simt: Device, case: OpCase, dtypes: Dtypes, cols: int
) -> None:
    call = case.make_call((5, cols), dtypes, CPU)
    apart = run(simt, case, call)
    in_place = kernels.in_every_order(
        simt,
        lambda: kernels.backward(
            simt, case, call, apart.saved, recompute_output=True, in_place=True
        ),
    )
    assert_same_bits(in_place, apart.results, "in place")


@every_case
@a_wide_and_a_narrow_dtype
def test_output_without_statistics_has_the_same_bits(
    simt: Device, case: OpCase, dtypes: Dtypes
) -> None:
    call = case.make_call((5, 515), dtypes, CPU)
    outputs, saved = kernels.forward(simt, case, call, statistics=False)
    assert saved == {}
    assert_same_bits([outputs.output], [run(simt, case, call).output], "without statistics")


@every_case
@a_wide_and_a_narrow_dtype
def test_expanded_grad_output(simt: Device, case: OpCase, dtypes: Dtypes) -> None:
    """All rows equal: weight gradients that grow with the number of rows, not its root."""
    call = case.make_call((67, 130), dtypes, CPU)
    same = random_normal(1, 130, seed=9).to(dtypes.tensor).expand(67, 130).contiguous()
    call = call.replace(grad_output=same)
    assert_accurate(case, call, run_in_every_order(simt, case, call))
