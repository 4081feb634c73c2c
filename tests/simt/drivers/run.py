"""One run of a kernel: its buffers in device memory, and its Params."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.simt.device import Device
from tests.simt.memory import Memory
from tests.simt.params import activations
from tests.support.cases.activation import SCALARS

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

    def launch(self, launcher: str, **values: object) -> None:
        """A launcher with `values` in its Params: tensors as pointers, dtypes as ScalarType."""
        with self.memory.guarded():
            self.device.launch(launcher, {k: _field(v) for k, v in values.items()}, STREAM)

    def rule(
        self, p: float, state: Tensor | None = None, seed: int = 1, offset: int = 4
    ) -> ctypes.Structure:
        """memopt::kernels::DropoutRule with the state at `state`, or with a given one."""
        return self.device.dropout_rule(p, _field(state), seed, offset)


def activation_spec(name: str) -> dict[str, object]:
    """memopt::kernels::ActivationSpec."""
    return {"kind": activations()[name], "scalar": SCALARS.get(name, 0.0)}


def _field(value: object) -> object:
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, torch.dtype):
        return DTYPES[value]
    return value
