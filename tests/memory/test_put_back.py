"""Proves: what a measurement puts back of NumPy's arrays, of containers and of settings, and that
it tries all, whatever fails.
"""

from __future__ import annotations

import logging
import os
import sys
import types
import warnings
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


def array_of_objects() -> Any:
    array = np.empty((1, 2), dtype=object)
    array[0, 1] = []
    return array


def released() -> memoryview:
    view = memoryview(bytearray(1))
    view.release()
    return view


CONTAINERS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "array": (array_of_objects, lambda array: array[0, 1].append(1)),
    "proxy": (lambda: types.MappingProxyType({"deep": []}), lambda proxy: proxy["deep"].append(1)),
    "memory": (lambda: memoryview(bytearray(2)), lambda view: view.__setitem__(0, view[0] + 1)),
    "released": (released, lambda view: None),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_what_is_inside_of_containers_is_as_before(name: str) -> None:
    make, change = CONTAINERS[name]
    model, x = Sticks(lambda _: change(model.held)), torch.ones(2, WIDTH)
    model.held = held = make()

    def inside() -> object:
        return {**held} if name == "proxy" else "" if name == "released" else held.tolist()

    before = repr(inside())
    memopt.saved_bytes(model, x)
    memopt.anatomy(model, x, loss=torch.sum, measure=True)
    assert repr(inside()) == before


def deterministic() -> object:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def filters() -> object:
    return [*warnings.filters]


SETTINGS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "deterministic": (
        deterministic,
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    ),
    "benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
    ),
    "deterministic on mkldnn": (
        lambda: torch.backends.mkldnn.deterministic,
        lambda: setattr(torch.backends.mkldnn, "deterministic", True),
    ),
    "precision": (
        torch.get_float32_matmul_precision,
        lambda: torch.set_float32_matmul_precision("high"),
    ),
    "threads": (torch.get_num_threads, lambda: torch.set_num_threads(3)),
    "device": (torch.get_default_device, lambda: torch.set_default_device("meta")),
    "dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "attention": (
        torch.backends.cuda.flash_sdp_enabled,
        lambda: torch.backends.cuda.enable_flash_sdp(False),
    ),
    "anomalies": (
        torch.is_anomaly_enabled,
        lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    ),
    "print options": (
        lambda: repr(torch.tensor(1 / 3)),
        lambda: torch.set_printoptions(precision=1),
    ),
    "arguments of distributions": (
        lambda: torch.distributions.Distribution._validate_args,
        lambda: torch.distributions.Distribution.set_default_validate_args(False),
    ),
    "environment": (
        lambda: dict(os.environ),
        lambda: os.environ.update(TEST_PUT_BACK="1", HOME="/"),
    ),
    "filters": (filters, lambda: warnings.filterwarnings("ignore", message="of a test")),
    "levels": (
        lambda: logging.getLogger("tests.put_back").level,
        lambda: logging.getLogger("tests.put_back").setLevel(10),
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_as_before(name: str) -> None:
    read, change = SETTINGS[name]

    class Sets(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            change()
            return y

    before = read()
    x = torch.ones(2, WIDTH)
    for kind in (nn.Linear, Sets):  # the first may import modules
        model = kind(WIDTH, WIDTH)
        memopt.saved_bytes(model, x)
        memopt.anatomy(model, x, loss=torch.sum, measure=True)
    assert read() == before


def test_settings_stay_that_may_be_those_of_a_module_which_was_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TEST_PUT_BACK", raising=False)
    with unchanged():
        monkeypatch.setenv("TEST_PUT_BACK", "1")
        monkeypatch.setitem(sys.modules, "test_put_back", types.ModuleType("test_put_back"))
    assert os.environ["TEST_PUT_BACK"] == "1"
