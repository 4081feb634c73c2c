"""The interpreter finds what it claims to find.

Each sample kernel of faults/kernels.cu has a right form, which passes in every order of threads,
and a form with one planted fault, which is found: as a report that names kernel, block and thread,
as NaN from memory that nobody wrote, or as results that depend on the order of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from . import build
from .device import ORDERS, Device, KernelFault, Order
from .memory import Memory, bits

THREADS = 96  # kThreads of the samples: three warps

RIGHT_RESULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "missing_barrier": lambda x: x + x.sum(),
    "reused_too_early": lambda x: (3 * x.sum()).expand_as(x),
    "trusts_lockstep": lambda x: x[:32].sum().expand(1),
    "wrong_tail_write": lambda x: x,
    "wrong_tail_read": lambda x: x + torch.cat((x[1:], x.new_zeros(1))),
    "writes_its_input": lambda x: x,
    "uninitialised_shared": lambda x: x.sum().expand_as(x),
    "shared_overrun": lambda x: x.flip(0),
    "exit_before_barrier": lambda x: x[0].expand_as(x),
    "two_barriers": lambda x: x[0].expand_as(x),
    "shuffle_after_exit": lambda x: _warp_sums(x),
    "shuffle_in_branch": lambda x: _warp_sums(x),
    "mask_without_caller": lambda x: x[torch.arange(len(x)) // 2 * 2],
    "reads_lane_outside_mask": lambda x: _padded(x)[[i if i % 2 else i ^ 2 for i in range(len(x))]],
    "shuffle_in_groups": lambda x: (
        1000 * _padded(x)[[i + 4 if i % 8 < 4 else i for i in range(len(x))]]
        + _padded(x)[[i ^ 1 for i in range(len(x))]]
    ),
    "misaligned_vector": lambda x: x[: len(x) // 4 * 4],
    "register_array_overrun": lambda x: x,
    "blocks_collide": lambda x: torch.cat((x, x + 1, x + 2)),
}

# Part of the report for each fault that is reported where it happens.
PLACE = r"\(kernels\.cu:\d+\)"
THREAD = r"block \(0, 0\), thread \(\d+, 0\)"
REPORTS = {
    "wrong_tail_write": rf"out of bounds: 4 bytes written 0 bytes behind a buffer; {THREAD}",
    "wrong_tail_read": rf"out of bounds: 4 bytes read 0 bytes behind a buffer; {THREAD}",
    "writes_its_input": r"write to an input: buffer 0 .* has changed",
    "shared_overrun": r"shared memory: written beyond the 384 bytes .*; block \(0, 0\)",
    "exit_before_barrier": rf"divergent barrier: thread \d+ waits at __syncthreads {PLACE}, "
    r"but thread 69 has exited; block \(0, 0\)",
    "two_barriers": rf"divergent barrier: thread 95 waits at __syncthreads {PLACE}, "
    rf"but thread 0 waits at __syncthreads {PLACE}",
    "shuffle_after_exit": rf"absent lane: lane \d of warp 2 waits at __shfl_xor_sync {PLACE} "
    r"with mask 0xffffffff, but lane 5 has exited; block \(0, 0\)",
    "shuffle_in_branch": r"absent lane: lane \d of warp 2 waits at __shfl_xor_sync .*, "
    r"but lane 5 waits at __syncthreads",
    "mask_without_caller": rf"mask without its caller: lane \d+ at __shfl_sync {PLACE} "
    rf"with mask 0x55555555; {THREAD}",
    "reads_lane_outside_mask": r"absent lane: lane 0 reads lane 1 in __shfl_xor_sync",
    "shuffle_in_groups": r"width must be a power of two up to 32, got 12 at __shfl_down_sync",
    "misaligned_vector": r"misaligned access: 16 bytes at address \w+ in kernels\.cu:\d+; "
    + THREAD,
    "register_array_overrun": r"index out of bounds: 4 in an array of type 'float \[4\]' in "
    rf"kernels\.cu:\d+; {THREAD}",
}

N = 69  # leaves part of the last warp without work


def _warp_sums(x: Tensor) -> Tensor:
    sums = _padded(x).view(-1, 32).sum(1)
    return sums.repeat_interleave(32)[: len(x)]


def _padded(x: Tensor) -> Tensor:
    return torch.cat((x, x.new_zeros(THREADS - len(x))))


def run_sample(
    device: Device,
    name: str,
    *,
    faulty: bool,
    order: Order = ORDERS[0],
    grid: tuple[int, int, int] | None = None,
    block: tuple[int, int, int] = (THREADS, 1, 1),
    shared_bytes: int = 4 * THREADS,
) -> Tensor:
    """Runs the sample on the numbers 1 .. N, which float32 sums without rounding."""
    device.set_order(order)
    x = torch.arange(1, N + 1, dtype=torch.float32)
    memory = Memory(device)
    source = memory.put(x)
    result = memory.empty(len(RIGHT_RESULTS[name](x)), dtype=torch.float32)
    if grid is None:
        grid = (3, 1, 1) if name == "blocks_collide" else (1, 1, 1)
    with memory.guarded():
        device.call(
            "run_sample",
            name.encode(),
            ctypes.c_bool(faulty),
            ctypes.c_void_p(source.data_ptr()),
            ctypes.c_void_p(result.data_ptr()),
            ctypes.c_int(N),
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(*block),
            ctypes.c_int64(shared_bytes),
        )
    return result


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", RIGHT_RESULTS)
def test_right_form_passes_in_every_order(samples: Device, name: str, order: Order) -> None:
    expected = RIGHT_RESULTS[name](torch.arange(1, N + 1, dtype=torch.float32))
    torch.testing.assert_close(
        run_sample(samples, name, faulty=False, order=order), expected, rtol=0, atol=0
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", REPORTS)
def test_fault_is_reported(samples: Device, name: str, order: Order) -> None:
    with pytest.raises(KernelFault, match=REPORTS[name]) as report:
        run_sample(samples, name, faulty=True, order=order)
    if name != "writes_its_input":  # found by its trace in memory
        assert str(report.value).startswith(f"{name}<true>: ")


def test_uninitialised_shared_read_gives_nan(samples: Device) -> None:
    assert run_sample(samples, "uninitialised_shared", faulty=True).isnan().all()


def test_missing_barrier_gives_nan(samples: Device) -> None:
    assert run_sample(samples, "missing_barrier", faulty=True).isnan().any()


@pytest.mark.parametrize(
    "name", ["missing_barrier", "reused_too_early", "trusts_lockstep", "blocks_collide"]
)
def test_race_depends_on_the_order_of_threads(samples: Device, name: str) -> None:
    results = []
    for order in ORDERS:
        samples.reset()
        results.append(bits(run_sample(samples, name, faulty=True, order=order)))
    assert not all(torch.equal(results[0], other) for other in results[1:])


def test_device_works_after_a_fault(samples: Device) -> None:
    with pytest.raises(KernelFault):
        run_sample(samples, "exit_before_barrier", faulty=True)
    samples.reset()
    assert run_sample(samples, "exit_before_barrier", faulty=False).eq(1).all()


@pytest.mark.parametrize(
    ("choice", "report"),
    [
        ({"grid": (0, 1, 1)}, r"the grid must be .*, got \(0, 1, 1\)"),
        ({"grid": (1, 65536, 1)}, r"the grid must be .*, got \(1, 65536, 1\)"),
        ({"block": (32, 33, 1)}, r"a block must have 1\.\.1024 threads, got \(32, 33, 1\)"),
        ({"block": (0, 1, 1)}, r"a block must have 1\.\.1024 threads, got \(0, 1, 1\)"),
        ({"shared_bytes": 48 * 1024 + 1}, r"limited to 49152 bytes .*, got 49153"),
    ],
)
def test_launch_that_a_device_refuses_is_reported(
    samples: Device, choice: dict[str, Any], report: str
) -> None:
    with pytest.raises(KernelFault, match="^missing_barrier<false>: launch: .*" + report):
        run_sample(samples, "missing_barrier", faulty=False, **choice)
    assert samples.launches() == []


def test_lanes_that_the_block_does_not_have_are_absent(samples: Device) -> None:
    with pytest.raises(KernelFault, match="but lane 8 is not in the block"):
        run_sample(samples, "shuffle_after_exit", faulty=False, block=(72, 1, 1))


def test_launch_is_recorded(samples: Device) -> None:
    run_sample(samples, "missing_barrier", faulty=False)
    (launch,) = samples.launches()
    assert launch == ("missing_barrier<false>", (1, 1, 1), (THREADS, 1, 1), 4 * THREADS, 0)


def test_shared_memory_other_than_the_dynamic_does_not_compile(tmp_path: Path) -> None:
    """As a plain variable it would be private to each thread, and no test would find it."""
    source = tmp_path / "static.cu"
    source.write_text(
        "#include <cuda_runtime.h>\n__global__ void kernel() { __shared__ float tile[32]; }"
    )
    with pytest.raises(RuntimeError, match=r"weak declaration of .tile."):
        build.library("static", [source])
