"""Proves that wrong arguments of memopt.compile are named, before anything is compiled."""

from __future__ import annotations

import importlib
import sys
import warnings

import pytest
import torch
from torch import nn

import memopt
from memopt._compile import api


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model(in_place: bool) -> None:
    model = nn.Linear(2, 2)
    if in_place:
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    with pytest.raises(TypeError, match=r"^compile: model must not be compiled already, got "):
        memopt.compile(model)


def test_a_compiled_function() -> None:
    with pytest.raises(TypeError, match=r"^compile: model must not be compiled already, got func"):
        memopt.compile(torch.compile(torch.sin, backend="eager"))


def test_no_model() -> None:
    with pytest.raises(
        TypeError, match=r"^compile: model must be a module or a function, got int$"
    ):
        memopt.compile(3)


@pytest.mark.parametrize("backend", ["aot_eager", "eager", torch.sin])
def test_another_backend(backend: object) -> None:
    with pytest.raises(ValueError, match=r"^compile: backend must be 'inductor', which lets the "):
        memopt.compile(nn.Linear(2, 2), backend=backend)


def test_mode_and_options() -> None:
    with pytest.raises(
        ValueError, match=r"^compile: mode and options must not both be given, got "
    ):
        memopt.compile(nn.Linear(2, 2), mode="default", options={"epilogue_fusion": False})


def test_an_option_that_is_memopts() -> None:
    with pytest.raises(
        ValueError, match=r"^compile: options must leave 'custom_partitioner_fn' to "
    ):
        memopt.compile(nn.Linear(2, 2), options=memopt.compile.options())


@pytest.mark.parametrize("budget", [True, [1], torch.tensor(3)])
def test_a_budget_of_another_type(budget: object) -> None:
    with pytest.raises(
        TypeError, match=r"^compile: budget must be a number of bytes \(int\) or a "
    ):
        memopt.compile.options(budget)


@pytest.mark.parametrize("budget", ["lots", "0", "1.5 eggs"])
def test_a_text_that_is_no_size(budget: str) -> None:
    with pytest.raises(ValueError, match=r"^compile: budget must be (bytes or|at least one)"):
        memopt.compile.options(budget)


@pytest.mark.parametrize("budget", [0.0, -0.5, 1.5, float("nan")])
def test_a_share_out_of_range(budget: float) -> None:
    with pytest.raises(
        ValueError, match=r"^compile: budget as a share must be more than 0 and at most"
    ):
        memopt.compile(nn.Linear(2, 2), budget=budget)


@pytest.mark.parametrize("budget", [0, -1])
def test_no_bytes(budget: int) -> None:
    with pytest.raises(ValueError, match=r"^compile: budget in bytes must be positive, got "):
        memopt.compile(nn.Linear(2, 2), budget=budget)


def test_a_budget_below_the_floor() -> None:
    model = memopt.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), budget=100)
    with pytest.raises(Exception, match=r"compile: budget must be at least [\d,]+ bytes for this "):
        model(torch.randn(4, 8))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch._inductor.custom_graph_pass", "CustomPartitionerFn"),
        ("torch._functorch.partitioners", "cleanup_recompute_tags"),
    ],
)
def test_without_an_internal_it_is_torch_compile(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(importlib.import_module(module), name)
    monkeypatch.delitem(sys.modules, "memopt._compile._inductor", raising=False)
    api._say_once.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert memopt.compile.options() == {}
        assert memopt.compile.options(0.5) == {}
        model = memopt.compile(nn.Linear(2, 2), mode="max-autotune-no-cudagraphs")
    (message,) = (str(w.message) for w in said if "compile: " in str(w.message))
    assert f"lacks what the policy needs (cannot import name {name!r}" in message
    assert isinstance(model, torch._dynamo.OptimizedModule)
    api._say_once.cache_clear()


def test_takes_the_arguments_of_torch_compile() -> None:
    @memopt.compile(fullgraph=True, dynamic=False, disable=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    assert function(torch.zeros(1)).item() == 1
    options = memopt.compile.options()
    assert set(options) <= set(torch._inductor.list_options())
    assert memopt.compile(nn.Linear(2, 2), options={"allow_buffer_reuse": True}) is not None
