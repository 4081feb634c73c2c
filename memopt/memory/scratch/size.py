"""The size of a call's scratch, of a copy of an argument, and rules of copies alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

KiB = 1 << 10
TRANSPOSED = 60 * 60
"""Elements of the buffer through which a matrix of as many is transposed (`copy_transpose_valid`
in Copy.cpp)."""


class Scratch(NamedTuple):
    """Bytes inside one call of an operator, in addition to what it reads and returns."""

    known: int
    margin: int = 0
    """Bytes that may be needed in addition."""
    measured: int = 0
    """Bytes in addition that a call on this processor was seen to need."""


NONE = Scratch(0)

ScratchRule = Callable[[Sequence[Any], Sequence[Tensor], Sequence[Tensor]], Scratch]


def copy_of(value: Any) -> int:
    """Bytes of a copy of what is dense in no format."""
    if not isinstance(value, Tensor) or _is_dense(value):
        return 0
    return elements_of(value)


def copy_in(value: Any, memory_format: torch.memory_format = torch.contiguous_format) -> int:
    """Bytes of `value.contiguous(memory_format=...)`: 0 where it is the tensor itself."""
    if not isinstance(value, Tensor) or value.is_contiguous(memory_format=memory_format):
        return 0
    return elements_of(value)


def elements_of(tensor: Tensor) -> int:
    """Bytes of the elements, an expanded tensor's each for itself."""
    return tensor.numel() * tensor.element_size()


def format_of(tensor: Tensor) -> torch.memory_format:
    """The format that kernels compute in, by PyTorch's `suggest_memory_format`."""
    layout = _LAYOUTS.get(tensor.dim())
    if layout is None or tensor.is_contiguous():
        return torch.contiguous_format
    is_last = tensor.is_contiguous(memory_format=layout)
    return layout if is_last else torch.contiguous_format


def runs(tensor: Tensor, dims: Sequence[int]) -> int:
    """How many loops go through these dimensions (none: all), those in one stride being one."""
    places = {dim % tensor.dim() for dim in dims} or range(tensor.dim())
    steps = sorted((tensor.stride(dim), tensor.shape[dim]) for dim in places)
    steps = [(stride, size) for stride, size in steps if size > 1]
    joined = (inner[0] * inner[1] == outer[0] for inner, outer in itertools.pairwise(steps))
    return len(steps) - sum(joined)


def copies(*places: int) -> ScratchRule:
    """A rule: arguments that are made dense, in the format that they have."""

    def rule(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
        return Scratch(sum(copy_of(args[place]) for place in places if place < len(args)))

    return rule


def contiguous(*places: int) -> ScratchRule:
    """A rule: arguments that are made contiguous, channels last as well."""

    def rule(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
        return Scratch(sum(copy_in(args[place]) for place in places if place < len(args)))

    return rule


_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or format_of(tensor) is not torch.contiguous_format
