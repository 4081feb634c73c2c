"""The launchers' choices.

Which kernel they choose for a shape, in which grid and with how much shared memory; that results
are right on both sides of every threshold; and that no kernel is compiled which no test runs.
"""

from __future__ import annotations

import re

import pytest
import torch

from tests.support.bits import assert_same_bits
from tests.support.cases import GROUP_NORM_CASES, NORM_CASES, OP_CASES, VALUE_CASES, OpCase
from tests.support.cases.activation import TORCH
from tests.support.cases.dropout import ActivationDropoutCase
from tests.support.cases.gated import PackedCase
from tests.support.oracle import assert_results_accurate
from tests.support.shapes import BFLOAT16, DTYPES, FLOAT32, FLOAT64, Dtypes, channels_last

from . import build, cross_entropy, dropout, kernels
from .agreement import (
    assert_accurate,
    assert_outputs_accurate,
    path,
    run,
    run_in_every_order,
)
from .device import Attribute, Device, Launch
from .drivers import DRIVERS
from .drivers.norm import backward_parts
from .kernels import DENSE, Layout

CPU = torch.device("cpu")

ROWS_PATH = [
    "norm_forward_rows",
    "norm_backward_rows",
    "norm_reduce_parts_kernel",
]

# The longest row that stays in registers, for rows that can be cut into 16-byte vectors; others may
# be half as long.
FORWARD_IN_REGISTERS = {FLOAT32: 8192, BFLOAT16: 16384, FLOAT64: 4096}
BACKWARD_IN_REGISTERS = {FLOAT32: 4096, BFLOAT16: 8192, FLOAT64: 2048}

every_case = pytest.mark.parametrize("case", NORM_CASES, ids=str)
a_dtype_of_each_size = pytest.mark.parametrize("dtypes", FORWARD_IN_REGISTERS, ids=str)
in_vectors_and_not = pytest.mark.parametrize("in_vectors", [True, False])
LAYER_NORM_GELU = NORM_CASES[-1]


def forward_launch(device: Device, dtypes: Dtypes, size: tuple[int, int]) -> Launch:
    kernels.forward(device, LAYER_NORM_GELU, LAYER_NORM_GELU.make_call(size, dtypes, CPU))
    return device.launches()[-1]


def input_grad_launch(device: Device, dtypes: Dtypes, size: tuple[int, int]) -> Launch:
    """The only launch when no weight gradients are wanted."""
    call = LAYER_NORM_GELU.make_call(size, dtypes, CPU)
    _, statistics = kernels.forward(device, LAYER_NORM_GELU, call)
    kernels.backward(device, LAYER_NORM_GELU, call, statistics, (True, False, False))
    return device.launches()[-1]


def around(longest: int, in_vectors: bool) -> tuple[int, int]:
    """The longest row that stays in registers and the next one: vectors, or odd numbers."""
    return (longest, longest + 8) if in_vectors else (longest // 2 - 1, longest // 2 + 1)


@a_dtype_of_each_size
@in_vectors_and_not
def test_forward_takes_the_long_kernel_beyond_the_registers(
    simt: Device, dtypes: Dtypes, in_vectors: bool
) -> None:
    case = LAYER_NORM_GELU
    for cols in around(FORWARD_IN_REGISTERS[dtypes], in_vectors):
        call = case.make_call((2, cols), dtypes, CPU)
        assert_outputs_accurate(case, call, kernels.forward(simt, case, call)[0])
    assert path(simt) == ["norm_forward_rows", "norm_forward_long"]


@a_dtype_of_each_size
@in_vectors_and_not
def test_backward_takes_the_long_kernel_beyond_the_registers(
    simt: Device, dtypes: Dtypes, in_vectors: bool
) -> None:
    case = LAYER_NORM_GELU
    for cols in around(BACKWARD_IN_REGISTERS[dtypes], in_vectors):
        call = case.make_call((2, cols), dtypes, CPU)
        assert_accurate(case, call, run(simt, case, call))
    assert path(simt)[1::3] == ["norm_backward_rows", "norm_backward_long"]


@pytest.mark.parametrize(
    ("cols", "block"),
    [
        (1, (1, 128)),
        (9, (2, 64)),  # 8 elements a thread
        (20, (2, 64)),  # 16 elements a thread, where the row can be cut into vectors
        (129, (32, 4)),
        (512, (32, 4)),
        (516, (64, 2)),
        (1028, (96, 1)),
        (4095, (512, 1)),
        (8192, (512, 1)),
    ],
)
def test_forward_block_has_as_many_threads_as_the_row_needs(
    simt: Device, cols: int, block: tuple[int, int]
) -> None:
    assert forward_launch(simt, FLOAT32, (1, cols)).block == (*block, 1)


@pytest.mark.parametrize(
    ("cols", "block"),
    [
        (1, (1, 256)),
        (5, (2, 128)),  # 4 elements a thread
        (12, (2, 128)),  # 8 elements a thread
        (256, (32, 8)),
        (1024, (128, 2)),
        (1028, (160, 1)),
        (2047, (512, 1)),
        (4096, (512, 1)),
    ],
)
def test_backward_block_has_as_many_threads_as_the_row_needs(
    simt: Device, cols: int, block: tuple[int, int]
) -> None:
    assert input_grad_launch(simt, FLOAT32, (1, cols)).block == (*block, 1)


@every_case
def test_grid_strides_over_the_rows(simt: Device, case: OpCase) -> None:
    """At most 64 blocks of 128 rows for each multiprocessor forward, and two of 256 backward."""
    simt.set_attribute(Attribute.MULTIPROCESSORS, 1)
    call = case.make_call((64 * 128 + 5, 2), FLOAT32, CPU)
    assert_accurate(case, call, run(simt, case, call))
    assert path(simt) == ROWS_PATH
    assert [launch.grid for launch in simt.launches()] == [(64, 1, 1), (2, 1, 1), (1, 2, 1)]


@pytest.mark.parametrize(
    ("multiprocessors", "rows", "cols", "parts"),
    [
        (2, 0, 100, 1),
        (2, 1, 100, 1),
        (2, 33, 100, 3),  # 16 rows to a block
        (2, 1000, 100, 4),  # 512 threads to a multiprocessor: two blocks
        (132, 100_000, 100, 264),
        (132, 100_000, 2048, 264),
        (132, 100_000, 4096, 132),
        (132, 100_000, 4100, 132),
        (132, 7, 4100, 7),
    ],
)
def test_parts_of_the_weight_gradients(
    simt: Device, multiprocessors: int, rows: int, cols: int, parts: int
) -> None:
    simt.set_attribute(Attribute.MULTIPROCESSORS, multiprocessors)
    assert backward_parts(simt, rows, cols, torch.float32) == parts


@every_case
def test_weight_gradients_take_a_second_kernel(simt: Device, case: OpCase) -> None:
    """32 columns of dgamma or dbeta to a block; not launched where neither is wanted."""
    call = case.make_call((5, 100), FLOAT32, CPU)
    outcome = run(simt, case, call)
    assert path(simt) == ROWS_PATH
    assert simt.launches()[-1][1:] == ((4, 2, 1), (32, 32, 1), 32 * 33 * 4, kernels.STREAM)
    simt.reset()
    kernels.backward(simt, case, call, outcome.saved, (True, False, False))
    assert path(simt) == ["norm_backward_rows"]
    assert simt.launches()[0].stream == kernels.STREAM


@every_case
def test_nothing_is_launched_for_nothing(simt: Device, case: OpCase) -> None:
    empty = case.make_call((0, 100), FLOAT32, CPU)
    _, statistics = kernels.forward(simt, case, empty)
    kernels.backward(simt, case, empty, statistics, (True, False, False), recompute_output=True)
    call = case.make_call((5, 100), FLOAT32, CPU)
    assert simt.launches() == []
    _, statistics = kernels.forward(simt, case, call)
    simt.reset()
    kernels.backward(simt, case, call, statistics, (False, False, False))
    assert simt.launches() == []


@pytest.mark.parametrize(
    ("shared_bytes_per_block", "used"),
    [
        (1024 + 4097 * 8, 1024 + 4097 * 8),  # the row is staged in shared memory
        (1024 + 4097 * 8 - 1, 1024),  # it is read again
    ],
)
def test_long_forward_row_waits_in_shared_memory_if_it_fits(
    simt: Device, shared_bytes_per_block: int, used: int
) -> None:
    simt.set_attribute(Attribute.SHARED_BYTES_PER_BLOCK, shared_bytes_per_block)
    assert forward_launch(simt, FLOAT64, (1, 4097)).shared_bytes == used


def test_long_backward_row_waits_in_shared_memory_if_it_fits(simt: Device) -> None:
    """First the sums of the weight gradients, then x and dy; the bits are the same wherever."""
    case = LAYER_NORM_GELU
    call = case.make_call((5, 8193), BFLOAT16, CPU)
    reference = run(simt, case, call)
    assert_results_accurate(case, call, reference.results)
    row_sums, weight_sums, x_and_dy = 512, 65552, 32800  # bytes, each a multiple of 16
    for limit, used in (
        (row_sums + weight_sums + x_and_dy, row_sums + weight_sums + x_and_dy),
        (row_sums + weight_sums + x_and_dy - 1, row_sums + weight_sums),
        (row_sums + weight_sums - 1, row_sums + x_and_dy),
        (row_sums + x_and_dy - 1, row_sums),
    ):
        simt.reset()
        simt.set_attribute(Attribute.SHARED_BYTES_PER_BLOCK, limit)
        assert_same_bits(run(simt, case, call), reference, f"{limit} bytes of shared memory")
        _, backward, _ = simt.launches()
        assert backward.kernel.startswith("norm_backward_long<")
        assert backward.shared_bytes == used


@every_case
@pytest.mark.parametrize(
    ("shared_bytes_per_block", "layout"),
    [(96 * 1024, DENSE), (4 * 1024, Layout(offset=1, row_gap=3))],
    ids=str,
)
def test_long_rows_are_right_in_every_order(
    simt: Device, case: OpCase, shared_bytes_per_block: int, layout: Layout
) -> None:
    """Staged in shared memory, and read again from tensors off their alignment."""
    simt.set_attribute(Attribute.SHARED_BYTES_PER_BLOCK, shared_bytes_per_block)
    call = case.make_call((3, 4100), FLOAT64, CPU)
    assert_accurate(case, call, run_in_every_order(simt, case, call, layout=layout))
    assert path(simt)[:2] == ["norm_forward_long", "norm_backward_long"]


@pytest.mark.parametrize("case", [c for c in OP_CASES if c.family in DRIVERS], ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_one_tensor_off_its_alignment_is_enough(simt: Device, case: OpCase, dtypes: Dtypes) -> None:
    """To move elements instead of vectors: the interpreter would report a misaligned vector."""
    call = case.make_call((3, 256), dtypes, CPU)
    aligned = run(simt, case, call)
    for name in kernels.tensor_names(case):
        layout = Layout(offset=1, only=name)
        assert_same_bits(run(simt, case, call, layout=layout), aligned, f"{name} off alignment")


def compiled_kernels(device: Device) -> set[str]:
    """Every instance of every __global__ function."""
    sources = [*build.KERNEL_SOURCES, *(build.KERNELS / "cuda").glob("*.cuh")]
    names = {
        name
        for source in sources
        for name in re.findall(r"__global__[^;{]*?\b(\w+)\(\w*Params", source.read_text())
    }
    assert len(names) >= 7
    functions = device.function_names()
    return {f for f in functions if f.partition("<")[0] in names and "{lambda" not in f}


def test_every_compiled_kernel_runs(simt: Device) -> None:
    """Short and long rows of every type, by vectors and off alignment, through every op."""
    # The table of ops has the packed units of some activations only.
    packed = [PackedCase("gated_packed", name, interleaved=True) for name in TORCH]
    for dtype in dropout.DTYPES:
        for offset in (0, 1):
            dropout.run(simt, torch.ones(128, dtype=dtype), 0.5, offset=offset)
            for cols in (128, 129):
                logits, target = torch.ones(1, cols, dtype=dtype), torch.zeros(1, dtype=torch.int64)
                cross_entropy.run(simt, logits, target, layout=Layout(offset=offset))
    cross_entropy.run_split_sum(simt, [torch.ones(3, dtype=torch.bfloat16)] * 2)
    for dtypes in DTYPES:
        for layout in (DENSE, Layout(offset=1)):
            for size, groups in (((2, 8, 4, 8), 2), ((2, 9, 5, 7), 3)):
                planes = GROUP_NORM_CASES[0].make_call(size, dtypes, CPU, groups=groups)
                for call in (planes, planes.map(channels_last)):
                    run(simt, GROUP_NORM_CASES[0], call, layout=layout)
    dropped = [ActivationDropoutCase("activation_dropout", activation=name) for name in TORCH]
    for case in (*(case for case in VALUE_CASES if case.family in DRIVERS), *packed, *dropped):
        for dtypes in DTYPES:
            beyond_registers = 32768 // dtypes.tensor.itemsize + 8
            lengths = (128, 129, beyond_registers, beyond_registers + 1)
            for cols in (128,) if case.elementwise else lengths:
                for layout in (DENSE, Layout(offset=1)):
                    mask = tuple(cols < 1000 or name == "input" for name in case.masked) or None
                    call = case.make_call((1, cols), dtypes, CPU)
                    _, statistics = kernels.forward(simt, case, call, layout=layout)
                    kernels.backward(simt, case, call, statistics, mask, layout=layout)
    launched = {launch.kernel for launch in simt.launches()}
    assert compiled_kernels(simt) - launched == set()
