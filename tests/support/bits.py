"""Whether results have the same bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """Its elements' bits as integers, so that NaN equals NaN and -0 is not 0."""
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor)
    return tensor.detach().contiguous().view(INTEGERS[tensor.element_size()])


def assert_same_bits(actual: Any, expected: Any, what: str = "results") -> None:
    """Tensors, None, and mappings and sequences of them, in each other: the same ones, of the same
    types and shapes, in the same bits.
    """
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), f"{what}: missing"
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
        if not torch.equal(bits(actual), bits(expected)):
            difference = (actual.detach().double() - expected.detach().double()).abs().max()
            raise AssertionError(f"{what}: other bits, differ by up to {difference}")
    elif isinstance(expected, Mapping):
        assert list(actual) == list(expected), what
        for name, value in expected.items():
            assert_same_bits(actual[name], value, f"{what}: {name}")
    elif isinstance(expected, Iterable):
        for place, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_same_bits(a, e, f"{what}: {place}")
    else:
        assert actual is expected is None, f"{what}: got {actual}, expected {expected}"
