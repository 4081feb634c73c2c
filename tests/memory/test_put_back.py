"""Proves: what a measurement puts back of NumPy's arrays, and that it tries all, whatever fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.memory.unchanged import unchanged
from tests.support.fingerprint import Fingerprint

WIDTH = 8


class Sticks(nn.Module):
    """Something that cannot be what it was, before and behind what can."""

    def __init__(self, change: Callable[[Any], object]) -> None:
        super().__init__()
        self.change = change
        self.array = np.zeros(4, dtype=np.float32)
        self.linear = nn.Linear(WIDTH, 300)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.array)
        self.linear.weight.data.add_(1)
        self.calls += 1
        return self.linear(x)


def resizes(array: Any) -> None:
    array.resize(len(array) + 1, refcheck=False)


def freezes(array: Any) -> None:
    if array.flags.writeable:
        array += 1
    array.flags.writeable = False


def reads_as_integers(array: Any) -> None:
    array.dtype = np.int32


@pytest.mark.parametrize("change", [resizes, freezes, reads_as_integers])
def test_arrays_have_their_size_kind_and_flags_again(change: Callable[[Any], object]) -> None:
    model, x = Sticks(change), torch.ones(2, WIDTH)
    before = Fingerprint(model, x)
    memopt.saved_bytes(model, x)
    assert Fingerprint(model, x).differences(before) == []
    assert model.array.dtype == np.float32
    assert model.array.flags.writeable


def test_what_cannot_be_put_back_keeps_nothing_else_from_it() -> None:
    """The error says so when all was tried."""

    model, x = Sticks(lambda array: None), torch.ones(2, WIDTH)
    model.numbers = numbers = bytearray(4)  # type: ignore[assignment]
    before = Fingerprint(model.linear, model.array, x)
    as_before = unchanged(model, x)
    as_before.__enter__()
    model(x).sum().backward()
    numbers.append(1)
    with memoryview(numbers), pytest.raises(BufferError):  # they cannot be resized meanwhile
        as_before.__exit__(None, None, None)
    assert Fingerprint(model.linear, model.array, x).differences(before) == []
    assert model.calls == 0
