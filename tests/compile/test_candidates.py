"""Proves which of the ways to divide a graph is taken, that settings are never mixed, and that
blocks that are compiled one by one share their graphs.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.autograd.graph import region_activation_memory_budget

import memopt
from memopt._compile._inductor import Partitioner
from memopt._compile.candidates import Candidate, freely, within
from memopt._compile.policy import Cut
from tests.compile.support import blocks, no_kernels, sample, step_bytes

ROOT = Path(__file__).parents[2]
CUT = Cut(frozenset(), frozenset())


def way(name: str, most: int, work: float, kept: int = 0) -> Candidate:
    return Candidate(name, CUT, kept, most, "", work, 0)


def test_without_a_budget_the_lowest_peak_in_about_the_same_work() -> None:
    own = way("own", 100, 50.0)
    for alone in (False, True):
        ways = [way("low", 80, 50.9), way("lower, slower", 60, 52.0)]
        assert freely(own, ways, alone).name == "low"
        assert freely(own, [way("faster, higher", 101, 10.0)], alone).name == "own"
        assert freely(own, [], alone).name == "own"


def test_of_equal_peaks_the_one_that_keeps_less_while_others_run() -> None:
    """Where none does, nothing is worked for a peak that is the same."""
    own, less = way("own", 1000, 50.0, kept=70), way("less", 999, 50.5, kept=60)
    assert freely(own, [less], alone=False) == less
    assert freely(own, [less], alone=True) == own
    assert freely(own, [way("more", 1000, 49.0, kept=80)], alone=False) == own


def test_within_a_budget_the_least_work() -> None:
    ways = [way("a", 100, 50.0), way("b", 70, 60.0), way("c", 60, 55.0)]
    found = [within(budget, ways) for budget in (100, 99, 60, 59)]
    assert [f and f.name for f in found] == ["a", "c", "c", None]


def test_equal_settings_are_equal() -> None:
    """By which torch.compile sees that two blocks may share a graph. One byte is not all."""
    assert Partitioner(3) == Partitioner(3)
    assert hash(Partitioner(None)) == hash(Partitioner(None))
    assert Partitioner(1) != Partitioner(1.0)
    assert Partitioner(None) != Partitioner(1.0)


@pytest.mark.slow
def test_blocks_compiled_one_by_one_share_their_graph(caplog: pytest.LogCaptureFixture) -> None:
    """More of them than PyTorch would compile one function for (`recompile_limit`)."""
    model, x = blocks(10, width=16), sample(1, 8, 16)
    with no_kernels(), caplog.at_level(logging.INFO, "memopt.compile"):
        compiled = nn.Sequential(*(memopt.compile(block) for block in model))
        compiled(x).sum().backward()
    graphs = [r for r in caplog.records if r.name == "memopt.compile"]
    # The first block's input has no gradient, and those of the others have.
    assert len(graphs) == 2


@pytest.mark.slow
def test_one_graph_within_two_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, and once more from a warm cache: each holds what it held, whichever was
    compiled before.
    """
    model, x = blocks(1, width=16), sample(2, 32, 16)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def held(budgets: list[float]) -> dict[float, int]:
        torch.compiler.reset()
        counters.clear()
        compiled = {b: memopt.compile(model, budget=b) for b in budgets}
        return {
            b: step_bytes(lambda b=b: compiled[b](x).square().mean(), model).held for b in budgets
        }

    with torch._functorch.config.patch(enable_autograd_cache=True):
        cold = held([1.0, 0.8])
        assert cold[0.8] != cold[1.0]
        assert counters["aot_autograd"]["autograd_cache_hit"] == 0
        assert held([0.8, 1.0]) == cold
        assert counters["aot_autograd"]["autograd_cache_hit"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "BERT"])
def test_never_a_higher_peak_than_torch_compile_of_a_real_model(name: str) -> None:
    """By the allocator's count: without a budget, and with the peak that PyTorch's own budget
    reaches as a budget.
    """
    pytest.importorskip("transformers")
    program = [sys.executable, "-m", "tests.compile.peaks", name]
    run = subprocess.run(program, cwd=ROOT, check=True, capture_output=True, text=True)
    peaks = json.loads(run.stdout.splitlines()[-1])
    assert peaks["memopt"] <= peaks["torch"]
    assert peaks["memopt within that"] <= peaks["torch at half"]


@pytest.mark.slow
def test_a_share_that_a_region_asks_pytorch_for(caplog: pytest.LogCaptureFixture) -> None:
    """It is PyTorch's own choice there, and does not change memopt's cuts nor their budgets."""
    model, x = blocks(1, width=16), sample(2, 32, 16)

    def within(share: float) -> Callable[[], torch.Tensor]:
        def loss() -> torch.Tensor:
            with region_activation_memory_budget(share):
                return model(x).square().mean()

        return loss

    def bytes_of(share: float, budget: int | float | None) -> tuple[int, int]:
        with no_kernels():
            return step_bytes(memopt.compile(within(share), budget=budget), model)

    with no_kernels():
        everything = step_bytes(torch.compile(within(0.0)), model)
    assert bytes_of(0.0, None).most <= everything.most
    assert bytes_of(0.5, 10**6) == bytes_of(1.0, 10**6)
