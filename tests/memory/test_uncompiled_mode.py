"""What memopt measures under a dispatch mode leaves torch.compile as it was: a model compiles
afterwards as if nothing had been measured. torch.compile gives up, for good, each function that it
meets under a mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._compat import CompilerOff

ROWS, WIDTH = 4, 8


class Net(nn.Module):
    """One function of its own, which a compiler has to see."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)).sum()


class Graphs:
    """A backend that counts what it compiles, and runs it as it is."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


def debugged(model: nn.Module, x: Tensor) -> None:
    memopt.checkpoint(model, x, debug=True).backward()


def deciding(model: nn.Module, x: Tensor) -> None:
    memopt.checkpoint(model, x, keep_decisions=True).backward()


MEASURED: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "check": memopt.check,
    "anatomy": memopt.anatomy,
    "largest_batch": lambda model, x: memopt.largest_batch(model, x, "1GB"),
    "fits": lambda model, x: memopt.fits(model, x, "1GB"),
    "a region that is debugged": debugged,
    "a region that keeps decisions": deciding,
}


@pytest.mark.parametrize("measure", MEASURED.values(), ids=MEASURED)
def test_a_model_is_compiled_after_it_was_measured(
    graphs: Graphs, measure: Callable[[nn.Module, Tensor], object]
) -> None:
    compiled = torch.compile(Net(), backend=graphs, dynamic=False)
    measure(compiled, torch.randn(ROWS, WIDTH))
    for rows in (ROWS, ROWS + 1):
        compiled(torch.randn(rows, WIDTH)).backward()
    assert graphs.count == 2
    torch.compile(Net(), backend=graphs)(torch.randn(ROWS, WIDTH))
    assert graphs.count == 3, "another model of the class"


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_inside_compiled_code(graphs: Graphs) -> None:
    """The compiler, which is at work there, is so again afterwards."""
    net = Net()

    @torch.compile(backend=graphs)
    def step(x: Tensor) -> Tensor:
        twice = x * 2
        off = CompilerOff()
        loss = net(twice)
        off.end()
        return loss * 3

    step(torch.randn(ROWS, WIDTH, requires_grad=True)).backward()
    before = graphs.count
    assert before > 0
    torch.compile(net, backend=graphs)(torch.randn(ROWS, WIDTH))
    assert graphs.count == before + 1


def test_two_threads_that_measure_in_turns(graphs: Graphs) -> None:
    """The one that ends last finds the compiler as the one that began first did."""
    compiled = torch.compile(Net(), backend=graphs)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(CompilerOff).result()
        second = CompilerOff()
        threads.submit(first.end).result()
        compiled(torch.randn(ROWS, WIDTH))
        assert graphs.count == 0
        second.end()
    compiled(torch.randn(ROWS, WIDTH))
    assert graphs.count == 1
