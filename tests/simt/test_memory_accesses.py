"""No kernel touches memory that is not its own, on any path that ends in a tail.

The interpreter reports each access to the guard zones around the buffers.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.cases import OP_CASES, OpCase, Results
from tests.support.shapes import BFLOAT16, FLOAT32, FLOAT64, Dtypes

from . import dropout, kernels
from .agreement import run
from .device import Attribute, Device
from .drivers import DRIVERS
from .kernels import DENSE, Layout

CPU = torch.device("cpu")

CASES = [case for case in OP_CASES if case.family in DRIVERS]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def assert_finite(results: Results) -> None:
    """Nothing in them comes from a guard zone, which is NaN."""
    for name, result in results.items():
        assert result is None or result.isfinite().all(), name


SIZES = (1, 8, 31, 129, 520)
SOME_DTYPES = (FLOAT32, BFLOAT16, Dtypes(torch.float16, torch.float32), FLOAT64)


# Every two values of different lists meet. (Other tests run more, and accesses are checked there.)
@pytest.mark.parametrize(
    ("case", "dtypes", "cols"),
    [
        (case, SOME_DTYPES[(place + turn) % len(SOME_DTYPES)], cols)
        for place, case in enumerate(CASES)
        for turn, cols in enumerate(SIZES)
    ],
    ids=str,
)
def test_row_in_registers(simt: Device, case: OpCase, dtypes: Dtypes, cols: int) -> None:
    call = case.make_call((3, cols), dtypes, CPU)
    gap = 0 if case.elementwise else 3
    for layout in (DENSE, Layout(offset=1, row_gap=gap)):
        outcome = run(simt, case, call, layout=layout)
        assert_finite(outcome)
        again = kernels.backward(simt, case, call, outcome.saved, in_place=True, layout=layout)
        assert_finite(again)


@every_case
@pytest.mark.parametrize("shared_bytes_per_block", [160 * 1024, 4 * 1024])
def test_long_row(simt: Device, case: OpCase, shared_bytes_per_block: int) -> None:
    """In shared memory, which it fills to the last byte but for padding, and without."""
    simt.set_attribute(Attribute.SHARED_BYTES_PER_BLOCK, shared_bytes_per_block)
    for cols in (4104, 4099):
        call = case.make_call((2, cols), FLOAT64, CPU)
        assert_finite(run(simt, case, call))


@pytest.mark.parametrize("case", [case for case in CASES if case.parameters], ids=str)
def test_parameters_that_are_missing_are_not_read(simt: Device, case: OpCase) -> None:
    call = case.make_call((3, 129), FLOAT32, CPU, weight=False, bias=False)
    assert_finite(run(simt, case, call))


def test_no_rows(simt: Device) -> None:
    for case in CASES:
        assert_finite(run(simt, case, case.make_call((0, 37), FLOAT32, CPU)))


@pytest.mark.parametrize("dtype", dropout.DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 8, 31, 129, 4100])
def test_dropout(simt: Device, dtype: torch.dtype, size: int) -> None:
    for offset in (0, 1):
        x = torch.ones(size, dtype=dtype)
        output, state = dropout.run(simt, x, 0.5, offset=offset)
        assert output.isfinite().all()
        grad, _ = dropout.run(simt, x, 0.5, saved_state=state, offset=offset, in_place=True)
        assert grad.isfinite().all()
