"""Dropout's launcher on CPU tensors, by way of the interpreter."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .device import Device
from .kernels import STREAM
from .memory import Memory

# memopt::kernels::ScalarType
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
# Forward's state: numbers that fill all bits.
SEED, OFFSET = 0x299F31D0A4093822, 4 * 0x05A308D3243F6A88


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def run(
    device: Device,
    x: Tensor,
    p: float,
    *,
    saved_state: Tensor | None = None,
    offset: int = 0,
    in_place: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Forward with SEED and OFFSET, which leaves them in the second result; with `saved_state`
    backward. offset: elements by which x and y are off their alignment.
    """
    memory = Memory(device)
    source = memory.put(x, offset, writable=in_place)
    target = source if in_place else memory.empty(*x.shape, dtype=x.dtype, offset=offset)
    given = None if saved_state is None else memory.put(saved_state)
    left = memory.empty(2, dtype=torch.int64) if saved_state is None else None
    by_value = (SEED, OFFSET) if saved_state is None else (1, 4)
    with memory.guarded():
        device.call(
            "simt_dropout",
            *(pointer(t) for t in (source, target, given, left)),
            *(ctypes.c_int64(value) for value in by_value),
            ctypes.c_double(p),
            ctypes.c_int64(x.numel()),
            ctypes.c_int(DTYPES[x.dtype]),
            ctypes.c_void_p(STREAM),
        )
    return target, left
