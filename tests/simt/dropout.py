"""Dropout's launcher on CPU tensors, by way of the interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from .device import Device
from .drivers.run import DTYPES, STREAM
from .memory import Memory

# Forward's state: numbers that fill all bits.
SEED, OFFSET = 0x299F31D0A4093822, 4 * 0x05A308D3243F6A88


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


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
        fields = {
            "x": source.data_ptr(),
            "y": target.data_ptr(),
            "rule": device.dropout_rule(p, pointer(given), *by_value),
            "state": pointer(left),
            "size": x.numel(),
            "dtype": DTYPES[x.dtype],
        }
        device.launch("dropout", fields, STREAM)
    return target, left
