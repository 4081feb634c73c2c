"""One run of a kernel: its buffers in device memory and its arguments as ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.simt.device import Device
from tests.simt.memory import Memory

# Any number that a launcher cannot know: each launch has to carry it.
STREAM = 0x5157

# memopt::kernels::ScalarType
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}


@dataclass(frozen=True)
class Layout:
    """How tensors lie in memory."""

    offset: int = 0
    """Elements by which they are off their alignment."""

    only: str | None = None
    """The one tensor that the offset is for, by its name in the Params structs; None: all."""

    row_gap: int = 0
    """Unused elements between the rows of what the kernel takes by rows; outputs are contiguous."""

    def offset_of(self, name: str) -> int:
        return self.offset if self.only in (None, name) else 0


DENSE = Layout()


class Run:
    """Buffers by the names that the Params structs give them."""

    def __init__(self, device: Device, layout: Layout) -> None:
        self.device = device
        self.layout = layout
        self.memory = Memory(device)

    def put(
        self, name: str, tensor: Tensor | None, *, row_gap: int = 0, writable: bool = False
    ) -> Tensor | None:
        """A copy in device memory; None for None."""
        if tensor is None:
            return None
        offset = self.layout.offset_of(name)
        return self.memory.put(tensor, offset, row_gap, writable=writable)

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Unwritten memory for a result."""
        return self.memory.empty(*shape, dtype=dtype, offset=self.layout.offset_of(name))

    def call(self, function: str, *arguments: object) -> None:
        """A launcher of bindings.cpp. Tensors and None become pointers, int becomes int64_t, bool
        and dtypes int, float double; the stream comes last.
        """
        with self.memory.guarded():
            self.device.call(function, *map(_argument, arguments), ctypes.c_void_p(STREAM))


@dataclass(frozen=True)
class Int:
    """An argument of the C type int."""

    value: int


def _argument(value: object) -> object:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, torch.dtype):
        return ctypes.c_int(DTYPES[value])
    if isinstance(value, Int):
        return ctypes.c_int(value.value)
    if isinstance(value, bool):
        return ctypes.c_int(value)
    if isinstance(value, int):
        return ctypes.c_int64(value)
    if isinstance(value, float):
        return ctypes.c_double(value)
    raise TypeError(f"no C type for {value!r}")
