"""Proves: kernels read what they need once and write each result once, as the comments at their
tops say. A GPU's memory bounds all of them, so a second read of a row would be a third of the time.

The interpreter counts the bytes of each access to the buffers of a launch. Those of the size of the
input are counted here; what is shorter (parameters, statistics, parts of sums) is little.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.cases import NORM_CASES, OP_CASES, OpCase
from tests.support.shapes import BFLOAT16, FLOAT32, FLOAT64, Dtypes

from . import kernels
from .device import Attribute, Device, Traffic
from .drivers import DRIVERS
from .memory import Memory
from .test_faults import run_sample

CPU = torch.device("cpu")
ROWS = 5
CASES = [case for case in OP_CASES if case.family in DRIVERS]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def test_a_second_read_is_seen(samples: Device) -> None:
    """A sample that adds to each number the one behind it."""
    samples.traffic = []
    run_sample(samples, "wrong_tail_read", faulty=False)
    (((read, written),)) = samples.traffic
    assert read.loaded == 2 * read.nbytes - 4
    assert (written.loaded, written.stored) == (0, written.nbytes)


def of_rows(launches: list[list[Traffic]], elements: int) -> list[Traffic]:
    """The buffers that have a row for each of the input's."""
    buffers = [buffer for launch in launches for buffer in launch]
    return [buffer for buffer in buffers if math.prod(buffer.shape) >= elements]


@every_case
@pytest.mark.parametrize("dtypes", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("cols", [512, 131], ids=["vectors", "elements"])
def test_rows_in_registers_move_once(simt: Device, case: OpCase, dtypes: Dtypes, cols: int) -> None:
    call = case.make_call((ROWS, cols), dtypes, CPU)
    simt.traffic = []
    _, saved = kernels.forward(simt, case, call)
    forward = of_rows(simt.traffic, ROWS * cols)
    simt.traffic = []
    kernels.backward(simt, case, call, saved, recompute_output=True)
    backward = of_rows(simt.traffic, ROWS * cols)
    for found in (forward, backward):
        assert found
        for buffer in found:
            moved = {buffer.loaded, buffer.stored} - {0}
            assert moved == {buffer.nbytes}, buffer
            assert buffer.loaded == 0 or buffer.stored == 0, buffer


@pytest.mark.parametrize("case", [case for case in CASES if case.parameters], ids=str)
@pytest.mark.parametrize("shared_bytes", [160 * 1024, 4 * 1024], ids=["staged", "read again"])
def test_long_rows_are_read_again_only_where_there_is_no_room(
    simt: Device, case: OpCase, shared_bytes: int
) -> None:
    """In shared memory a row waits for its next use. Without, layer_norm reads it for the mean, the
    variance and the output; the others, and every backward, have two uses.
    """
    reads = 1 if shared_bytes > 2 * 8 * 4104 else 3 if case in NORM_CASES else 2
    simt.set_attribute(Attribute.SHARED_BYTES_PER_BLOCK, shared_bytes)
    cols = 4104
    call = case.make_call((2, cols), FLOAT64, CPU)
    simt.traffic = []
    _, saved = kernels.forward(simt, case, call)
    kernels.backward(simt, case, call, saved)
    found = [buffer for buffer in of_rows(simt.traffic, 2 * cols) if buffer.shape[-2:] == (2, cols)]
    assert max(buffer.loaded / buffer.nbytes for buffer in found) == reads
    assert all(buffer.stored in (0, buffer.nbytes) for buffer in found)


def test_nothing_is_counted_unasked(simt: Device) -> None:
    case = CASES[0]
    kernels.forward(simt, case, case.make_call((ROWS, 8), FLOAT32, CPU))
    assert simt.traffic is None
    simt.traffic = []
    memory = Memory(simt)
    memory.empty(4, dtype=torch.float32)
    with memory.guarded():
        pass
    assert simt.traffic == [[Traffic((4,), 16, 0, 0)]]
