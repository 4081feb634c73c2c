"""The CUDA kernels of dropout and a residual in front of a norm, run by the interpreter: they drop
what the CPU kernels drop. What they share with the norms' row kernels: test_norms.py.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.bits import assert_same_bits
from tests.support.cases import ALL_DROPOUT_ADD_NORM_CASES
from tests.support.cases.dropout import DropoutAddNormCase, drawn_state, keep_scales
from tests.support.selection import pairwise
from tests.support.shapes import BFLOAT16, DTYPES, FLOAT32, FLOAT64, Dtypes

from . import kernels
from .device import Device
from .drivers import dropout_add_norm
from .drivers.run import DENSE, Run

CPU = torch.device("cpu")

every_case = pytest.mark.parametrize("case", ALL_DROPOUT_ADD_NORM_CASES, ids=str)
every_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=str)
a_dtype_of_each_size = pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16, FLOAT64], ids=str)
a_wide_and_a_narrow_dtype = pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16], ids=str)


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
    assert torch.equal(saved["rng_state"], drawn_state("cpu"))
    assert_same_bits([outputs["sum"]], [expected["sum"]], "sum")
    results = kernels.backward(simt, case, call, saved)
    nonzero = results["grad_residual"] != 0
    kept = keep_scales(call, torch.float32) != 0
    assert torch.equal(results["grad_input"] != 0, kept & nonzero)


@pytest.mark.parametrize(
    ("case", "dtypes", "cols"),
    pairwise(ALL_DROPOUT_ADD_NORM_CASES, DTYPES, (129, 520, 8200)),
    ids=str,
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
