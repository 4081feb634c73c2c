"""Dropout's CUDA kernel, run by the interpreter.

Philox gives the published answers; the kernel's results have the CPU kernel's bits for every type
and length, wherever the tensors lie, in every order of threads, in place too; the state that
forward leaves is the one that backward reads; every width of keep_scales() says the same.
"""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from torch import Tensor

from tests.support.bits import assert_same_bits
from tests.support.philox import KNOWN_ANSWERS, keep_mask, scaled
from tests.support.shapes import random_normal

from .device import Device
from .dropout import DTYPES, OFFSET, SEED, pointer, run
from .kernels import STREAM, in_every_order

TILE = {torch.float32: 4096, torch.float16: 4096, torch.bfloat16: 4096, torch.float64: 1024}

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def normal(size: int, dtype: torch.dtype) -> Tensor:
    return random_normal(size).to(dtype)


def on_the_cpu(x: Tensor, p: float) -> Tensor:
    return torch.ops.memopt._dropout_backward(x, torch.tensor([SEED, OFFSET]), p)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(simt: Device, counter, key, words) -> None:
    out = (ctypes.c_uint32 * 4)()
    simt.call("simt_philox", (ctypes.c_uint32 * 4)(*counter), (ctypes.c_uint32 * 2)(*key), out)
    assert tuple(out) == words


@pytest.mark.parametrize("first", [0, 16, 1 << 35, (1 << 35) - 16])
def test_every_width_of_keep_scales_says_the_same(simt: Device, first: int) -> None:
    results = []
    for width in (1, 2, 4, 8, 16):
        out = torch.empty(64)
        simt.call(
            "simt_keep_scales",
            *(ctypes.c_int64(SEED), ctypes.c_int64(OFFSET), ctypes.c_double(0.3)),
            *(
                ctypes.c_int64(first),
                ctypes.c_int64(64),
                ctypes.c_int(width),
                ctypes.c_void_p(pointer(out)),
            ),
        )
        results.append(out)
    for other in results[1:]:
        assert torch.equal(other, results[0])
    if first == 0:
        ones = torch.ones(64)
        assert torch.equal(
            results[0], scaled(ones, keep_mask(torch.tensor([SEED, OFFSET]), 64, 0.3), 0.3)
        )


@every_dtype
@pytest.mark.parametrize("size", [1, 3, 8, 127, 128, 129, 769, 1000, 4099])
def test_bits_of_the_cpu_kernel(simt: Device, dtype: torch.dtype, size: int) -> None:
    x = normal(size, dtype)
    for p in (0.1, 0.5, 1.0):
        forward, state = in_every_order(simt, lambda p=p: run(simt, x, p))
        assert state is not None
        assert state.tolist() == [SEED, OFFSET]
        backward, _ = run(simt, x, p, saved_state=state)
        assert_same_bits([forward, backward], [on_the_cpu(x, p)] * 2, f"{dtype}, {size}, {p}")


@every_dtype
@pytest.mark.parametrize("beyond", [-1, 0, 1, 8])
def test_one_block_for_each_tile(simt: Device, dtype: torch.dtype, beyond: int) -> None:
    x = normal(2 * TILE[dtype] + beyond, dtype)
    assert_same_bits([run(simt, x, 0.5)[0]], [on_the_cpu(x, 0.5)], "tiles")
    (launch,) = simt.launches()
    assert launch.kernel.partition("<")[0] == "dropout_kernel"
    assert launch.grid == (3 if beyond > 0 else 2, 1, 1)
    assert launch.block == (256, 1, 1)
    assert launch.shared_bytes == 0
    assert launch.stream == STREAM


@every_dtype
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_same_bits_wherever_the_tensors_lie(simt: Device, dtype: torch.dtype, offset: int) -> None:
    x = normal(TILE[dtype] + 133, dtype)
    forward, _ = in_every_order(simt, lambda: run(simt, x, 0.5, offset=offset))
    assert_same_bits([forward], [on_the_cpu(x, 0.5)], f"offset {offset}")


@every_dtype
def test_in_place_has_the_same_bits(simt: Device, dtype: torch.dtype) -> None:
    x = normal(1003, dtype)
    state = torch.tensor([SEED, OFFSET])
    results = in_every_order(simt, lambda: run(simt, x, 0.5, saved_state=state, in_place=True))
    assert_same_bits([results[0]], [on_the_cpu(x, 0.5)], "in place")


def test_an_empty_tensor_leaves_its_state_and_nothing_is_launched_in_backward(
    simt: Device,
) -> None:
    _, state = run(simt, torch.zeros(0), 0.5)
    assert state is not None
    assert state.tolist() == [SEED, OFFSET]
    assert len(simt.launches()) == 1
    run(simt, torch.zeros(0), 0.5, saved_state=state)
    assert len(simt.launches()) == 1


@every_dtype
def test_special_values_as_on_the_cpu(simt: Device, dtype: torch.dtype) -> None:
    values = [math.inf, -math.inf, math.nan, 0.0, -0.0, torch.finfo(dtype).max, -1.0]
    x = torch.tensor(values * 20, dtype=dtype)
    ours, cpus = run(simt, x, 0.5)[0], on_the_cpu(x, 0.5)
    torch.testing.assert_close(ours, cpus, rtol=0, atol=0, equal_nan=True)
