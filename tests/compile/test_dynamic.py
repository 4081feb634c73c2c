"""Proves what a budget is where sizes are symbols: a number of bytes holds for every batch that the
compiled graph runs for, by the allocator's count, and larger batches are compiled anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._compile import _inductor_sizes
from tests.compile.support import blocks, no_kernels, sample, step_bytes

pytestmark = pytest.mark.slow


class OfRows(nn.Module):
    """Its result has one dimension, whose size is a symbol alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean((1, 2))


def model_of_rows() -> nn.Module:
    return nn.Sequential(*blocks(1, width=16), OfRows())


def most(compiled: Callable[..., Tensor], model: nn.Module, rows: int) -> int:
    x = sample(rows, 16, 16)
    return step_bytes(lambda: compiled(x).sum(), model).most


def plain_peak(rows: int) -> int:
    """That of torch.compile, with numbers for sizes."""
    model = model_of_rows()
    return most(torch.compile(model, dynamic=False), model, rows)


@pytest.fixture(autouse=True)
def _nothing_was_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_inductor_sizes, "_seen", {})


@pytest.fixture
def graphs(caplog: pytest.LogCaptureFixture) -> Callable[[], list[Any]]:
    """Those that were divided until now."""
    caplog.set_level(logging.INFO, "memopt.compile")

    def found() -> list[Any]:
        return [r for r in caplog.records if r.name == "memopt.compile" and "nodes" in r.msg]

    return found


def test_peaks_are_counted_where_sizes_are_symbols(graphs: Callable[[], list[Any]]) -> None:
    """As in a graph of numbers: what is said is what the allocator counts, and the budget is kept
    by it.
    """
    with no_kernels():
        budget = int(0.8 * plain_peak(8))
        model = model_of_rows()
        found = most(memopt.compile(model, dynamic=True, budget=budget), model, 8)
    (graph,) = graphs()
    _, _, said, how, *_ = graph.args
    assert how == "counted"
    assert said <= budget
    assert abs(found - said) <= 8 + 0.005 * said
    assert found <= budget


@pytest.mark.parametrize(
    ("dynamic", "rows", "divided"),
    [
        # Traced with symbols at 4 rows: the graph runs for 8 as well, and keeps the budget there.
        pytest.param(None, (8, 4, 8, 6), 2, id="smaller than one that was met"),
        pytest.param(True, (3, 4, 8, 7), 3, id="larger than all"),  # for 3, 4 and 8
    ],
)
def test_a_graph_is_divided_for_the_largest_batch_that_was_met(
    dynamic: bool | None, rows: tuple[int, ...], divided: int, graphs: Callable[[], list[Any]]
) -> None:
    """So that every batch that it runs for keeps the budget; a larger one is compiled anew."""
    with no_kernels():
        budget = int(0.8 * plain_peak(8))
        model = model_of_rows()
        compiled = memopt.compile(model, dynamic=dynamic, budget=budget)
        assert [most(compiled, model, each) <= budget for each in rows] == [True] * 4
    assert len(graphs()) == divided


def test_a_budget_that_a_larger_batch_could_not_keep(graphs: Callable[[], list[Any]]) -> None:
    """One of 32 rows was met before: another model of the same ops has a budget for 3."""
    with no_kernels():
        budget = int(0.9 * plain_peak(3))
        model = model_of_rows()
        most(memopt.compile(model, dynamic=False), model, 32)
        torch.compiler.reset()
        compiled = memopt.compile(model, dynamic=True, budget=budget)
        assert most(compiled, model, 3) <= budget
    assert len(graphs()) == 2


@pytest.mark.parametrize("budget", [None, 0.8])
def test_without_bytes_to_keep_one_graph_runs_for_all_sizes(
    budget: float | None, graphs: Callable[[], list[Any]]
) -> None:
    """Neither a share asks for a largest size, nor does it leave a guard to count peaks."""
    with no_kernels():
        model = model_of_rows()
        compiled = memopt.compile(model, dynamic=True, budget=budget)
        for rows in (4, 2, 16):
            most(compiled, model, rows)
    assert len(graphs()) == 1


def test_a_largest_size_that_the_user_has_said(graphs: Callable[[], list[Any]]) -> None:
    """No guard of memopt's narrows what `mark_dynamic` promises, which would be an error."""
    with no_kernels():
        model = model_of_rows()
        compiled = memopt.compile(model, budget=10**9)
        for rows in (4, 8):
            x = sample(rows, 16, 16)
            torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
            compiled(x).sum().backward()
    assert len(graphs()) == 1
