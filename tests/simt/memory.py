"""Device memory for tests: tensors between guard zones, which show what leaves them.

Guard zones, memory that nobody has written, and the gaps between the rows of a strided matrix hold
the bytes 0xff, which are NaN in every floating-point type: what is read there shows in the results,
and what is written changes the zone. A kernel's access to it is a fault in itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tests.support.bits import INTEGERS, bits

from .device import Device, KernelFault

GUARD_BYTES = 1024  # on either side; keeps the alignment
ALIGNMENT = 256  # of cudaMalloc


class Memory:
    """The buffers of one call."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: list[_Buffer] = []

    def empty(self, *shape: int, dtype: torch.dtype, offset: int = 0, row_gap: int = 0) -> Tensor:
        """A tensor whose elements are all unwritten (NaN).

        offset: its first element lies this many elements behind an aligned address. row_gap: unused
        elements behind each row of a matrix.
        """
        buffer = _Buffer(shape, dtype, offset, row_gap)
        self._buffers.append(buffer)
        return buffer.tensor

    def put(
        self, values: Tensor, offset: int = 0, row_gap: int = 0, *, writable: bool = False
    ) -> Tensor:
        """A copy of `values`, laid out likewise. writable: the kernel may change it."""
        buffer = _Buffer(tuple(values.shape), values.dtype, offset, row_gap)
        buffer.tensor.copy_(values)
        buffer.constant = None if writable else values
        self._buffers.append(buffer)
        return buffer.tensor

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Within it a kernel may run.

        Raises KernelFault at the end if a guard zone has changed, or a buffer that is only read.
        """
        zones = [zone for buffer in self._buffers for zone in buffer.zones()]
        for zone in zones:
            self._device.guard(*zone)
        try:
            with self._device.watching([buffer.tensor for buffer in self._buffers]):
                yield
        finally:
            for zone in zones:
                self._device.unguard(*zone)
        for number, buffer in enumerate(self._buffers):
            what = f"buffer {number} of shape {tuple(buffer.tensor.shape)}, {buffer.tensor.dtype},"
            where = buffer.first_write_outside()
            if where is not None:
                raise KernelFault(
                    f"out of bounds: {what} was written {where} bytes from its beginning"
                )
            if buffer.has_changed():
                raise KernelFault(f"write to an input: {what} has changed")


class _Buffer:
    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, offset: int, row_gap: int
    ) -> None:
        cols = shape[-1] if shape else 1
        stride = cols + row_gap if len(shape) == 2 else cols
        strides = (stride, 1) if len(shape) == 2 else (1,) * len(shape)
        self._geometry = (shape, strides)
        self._dtype = dtype
        elements = stride * shape[0] if len(shape) == 2 else cols
        size = 2 * GUARD_BYTES + ALIGNMENT + (offset + elements) * dtype.itemsize
        arena = torch.full((size,), 255, dtype=torch.uint8)
        self._arena = arena[-arena.data_ptr() % ALIGNMENT :]
        self._begin = GUARD_BYTES + offset * dtype.itemsize
        self.tensor = self._view(self._arena)
        self.constant: Tensor | None = None  # what the kernel must leave in it

    def _view(self, arena: Tensor) -> Tensor:
        whole = arena[self._begin :]
        return whole[: whole.numel() // 8 * 8].view(self._dtype).as_strided(*self._geometry)

    def zones(self) -> list[tuple[int, int]]:
        """Address and size of everything around the elements."""
        begin = self._arena.data_ptr()
        end = begin + self._arena.numel()
        size = self._dtype.itemsize
        if self.tensor.numel() == 0:
            return [(begin, end - begin)]
        rows = self.tensor if self.tensor.dim() == 2 else self.tensor.reshape(1, -1)
        zones = []
        for row in rows:
            zones.append((begin, row.data_ptr() - begin))
            begin = row.data_ptr() + row.numel() * size
        return [*zones, (begin, end - begin)]

    def has_changed(self) -> bool:
        return self.constant is not None and not torch.equal(bits(self.tensor), bits(self.constant))

    def first_write_outside(self) -> int | None:
        arena = self._arena.clone()
        inside = self._view(arena)
        inside.view(INTEGERS[self._dtype.itemsize]).fill_(-1)
        changed = (arena != 255).nonzero()
        return int(changed[0]) - self._begin if changed.numel() else None
