"""The size of a call's scratch, and of a copy of an argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

KiB = 1 << 10


class Scratch(NamedTuple):
    """Bytes inside one call of an operator, in addition to what it reads and returns."""

    known: int
    margin: int = 0
    """Bytes that may be needed in addition."""


NONE = Scratch(0)

ScratchRule = Callable[[Sequence[Any], Sequence[Tensor], Sequence[Tensor]], Scratch]


def copy_of(value: Any) -> int:
    if not isinstance(value, Tensor) or _is_dense(value):
        return 0
    return value.numel() * value.element_size()


def _is_dense(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = layouts.get(tensor.dim())
    return layout is not None and tensor.is_contiguous(memory_format=layout)
