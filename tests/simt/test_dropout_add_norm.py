"""The CUDA kernels of dropout and a residual in front of a norm, run by the interpreter: what
test_norms.py proves of the norms whose row kernels they share, and that they drop what the CPU
kernels drop.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.support.cases import DROPOUT_ADD_NORM_CASES
from tests.support.cases.dropout import DropoutAddNormCase, drawn_state, keep_scales
from tests.support.cases.rms_norm import RmsNormCase
from tests.support.selection import pairwise
from tests.support.shapes import BFLOAT16, DTYPES, FLOAT32, FLOAT64, Dtypes

from . import kernels
from .agreement import assert_accurate, path, run, run_in_every_order
from .device import Attribute, Device
from .drivers import dropout_add_norm
from .drivers.run import DENSE, Run
from .kernels import Layout, assert_same_bits

CPU = torch.device("cpu")
CASES = (
    *DROPOUT_ADD_NORM_CASES,
    replace(DROPOUT_ADD_NORM_CASES[1], norm=RmsNormCase("rms_norm", True)),
)

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=str)
a_dtype_of_each_size = pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16, FLOAT64], ids=str)
a_wide_and_a_narrow_dtype = pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16], ids=str)


@every_case
@every_dtype
@pytest.mark.parametrize("cols", [1, 3, 128, 129, 769])
def test_accurate_for_every_length_of_row(
    simt: Device, case: DropoutAddNormCase, dtypes: Dtypes, cols: int
) -> None:
    call = case.make_call((5, cols), dtypes, CPU)
    outcome = run_in_every_order(simt, case, call)
    assert_accurate(case, call, outcome)
    assert torch.equal(outcome.saved["rng_state"], drawn_state("cpu"))


@every_case
@a_wide_and_a_narrow_dtype
@pytest.mark.parametrize(("rows", "cols"), [(0, 37), (1, 3), (131, 3), (2, 200), (33, 515)])
def test_accurate_for_every_number_of_rows(
    simt: Device, case: DropoutAddNormCase, dtypes: Dtypes, rows: int, cols: int
) -> None:
    call = case.make_call((rows, cols), dtypes, CPU)
    assert_accurate(case, call, run_in_every_order(simt, case, call))


@every_case
@every_dtype
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("cols", [129, 520])
def test_the_sum_has_the_cpus_bits(
    simt: Device, case: DropoutAddNormCase, dtypes: Dtypes, p: float, cols: int
) -> None:
    """So both drop the same elements, and round alike."""
    call = case.make_call((5, cols), dtypes, CPU).replace(p=p)
    outputs, saved = kernels.forward(simt, case, call)
    expected, _ = case.forward(call)
    assert_same_bits([outputs["sum"]], [expected["sum"]], "sum")
    results = kernels.backward(simt, case, call, saved)
    nonzero = results["grad_residual"] != 0
    kept = keep_scales(call, torch.float32) != 0
    assert torch.equal(results["grad_input"] != 0, kept & nonzero)


@pytest.mark.parametrize(
    ("case", "dtypes", "shared_bytes"),
    pairwise(CASES, (FLOAT32, BFLOAT16, FLOAT64), (96 * 1024, 4 * 1024)),
    ids=str,
)
def test_long_rows(
    simt: Device, case: DropoutAddNormCase, dtypes: Dtypes, shared_bytes: int
) -> None:
    """Staged in shared memory, and read again; more than one row to a block."""
    simt.set_attribute(Attribute.SHARED_BYTES_PER_BLOCK, shared_bytes)
    simt.set_attribute(Attribute.MULTIPROCESSORS, 1)
    for cols in (32768 // dtypes.tensor.itemsize + 9, 32768 // dtypes.tensor.itemsize + 8):
        simt.reset()
        simt.set_attribute(Attribute.SHARED_BYTES_PER_BLOCK, shared_bytes)
        simt.set_attribute(Attribute.MULTIPROCESSORS, 1)
        call = case.make_call((3, cols), dtypes, CPU)
        assert_accurate(case, call, run(simt, case, call))
        assert path(simt)[:2] == ["norm_forward_long", "norm_backward_long"]


@every_case
@a_wide_and_a_narrow_dtype
@pytest.mark.parametrize(("weight", "bias"), [(True, False), (False, True), (False, False)])
def test_parameters_may_be_missing(
    simt: Device, case: DropoutAddNormCase, dtypes: Dtypes, weight: bool, bias: bool
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
    simt: Device, case: DropoutAddNormCase, dtypes: Dtypes, cols: int, layout: Layout
) -> None:
    call = case.make_call((5, cols), dtypes, CPU)
    elsewhere = run(simt, case, call, layout=layout)
    assert_same_bits(elsewhere, run(simt, case, call), str(layout))


@every_case
@pytest.mark.parametrize("cols", [520, 8200])
def test_any_subset_of_results_has_the_same_bits(
    simt: Device, case: DropoutAddNormCase, cols: int
) -> None:
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
    simt: Device, case: DropoutAddNormCase, dtypes: Dtypes, cols: int
) -> None:
    call = case.make_call((5, cols), dtypes, CPU)
    apart = run(simt, case, call)
    in_place = kernels.backward(simt, case, call, apart.saved, in_place=True)
    for name in ("grad_residual", "grad_input"):
        assert_same_bits([in_place[name]], [apart[name]], f"{name} in place")


@pytest.mark.parametrize(
    ("case", "dtypes", "cols"), pairwise(CASES, DTYPES, (129, 520, 8200)), ids=str
)
def test_without_the_sums_gradient_residuals_is_the_norms(
    simt: Device, case: DropoutAddNormCase, dtypes: Dtypes, cols: int
) -> None:
    """In bits, and so are the output and the weights' gradients."""
    call = case.make_call((3, cols), dtypes, CPU).replace(grad_sum=None)
    outputs, saved = kernels.forward(simt, case, call)
    inner = case._norm_call(call, outputs["sum"])
    output, statistics = kernels.forward(simt, case.norm, inner)
    assert_same_bits([outputs["output"]], [output["output"]], "output")
    ours = kernels.backward(simt, case, call, saved)
    norms = kernels.backward(simt, case.norm, inner, statistics)
    norms["grad_residual"] = norms.pop("grad_input")
    for name, gradient in norms.items():
        assert_same_bits([ours[name]], [gradient], name)


@every_case
@pytest.mark.parametrize("cols", [515, 16400])
def test_output_without_statistics_has_the_same_bits(
    simt: Device, case: DropoutAddNormCase, cols: int
) -> None:
    call = case.make_call((5, cols), BFLOAT16, CPU)
    outputs, _ = kernels.forward(simt, case, call, statistics=False)
    with_statistics, _ = kernels.forward(simt, case, call)
    assert_same_bits(outputs, with_statistics, "without statistics")


@every_case
@a_dtype_of_each_size
@pytest.mark.parametrize("cols", [129, 520, 16400])
def test_forward_reads_a_state_that_it_is_given(
    simt: Device, case: DropoutAddNormCase, dtypes: Dtypes, cols: int
) -> None:
    call = case.make_call((2, cols), dtypes, CPU)
    drawn, saved = kernels.forward(simt, case, call)
    given = dropout_add_norm.forward_with_state(Run(simt, DENSE), case, call, saved["rng_state"])
    assert_same_bits(given, drawn, "a given state")


@every_case
def test_no_rows_leave_their_state(simt: Device, case: DropoutAddNormCase) -> None:
    for cols in (5, 20000):
        call = case.make_call((0, cols), FLOAT32, CPU)
        _, saved = kernels.forward(simt, case, call)
        assert torch.equal(saved["rng_state"], drawn_state("cpu"))
    assert len(simt.launches()) == 2
    kernels.forward(simt, case, call, statistics=False)
    assert len(simt.launches()) == 2
