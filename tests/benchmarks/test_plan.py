"""Proves that the ways which the benchmark of plans compares compute the same, and that their peaks
are of the same bytes.
"""

from __future__ import annotations

import copy

import pytest
import torch

import memopt
from benchmarks import plan
from memopt._plan.live import blocks_of
from memopt.applied import assign
from memopt.memory.step import Step


@pytest.mark.parametrize("name", sorted(plan.SIZES))
def test_ways_by_hand_compute_the_same(name: str) -> None:
    torch.manual_seed(0)
    sizes = plan.SMALLEST[name]
    layers = plan.layers_of(name, sizes)
    x = torch.randn(sizes.rows, sizes.tokens, sizes.width)
    expected = plan.Model(copy.deepcopy(layers))
    expected(x).backward()
    kinds = [plan.Every] if name == "encoder-decoder" else [plan.Every, plan.Segments]
    for kind in kinds:
        model = kind(copy.deepcopy(layers))
        model(x).backward()
        for mine, its in zip(model.parameters(), expected.parameters(), strict=True):
            assert mine.grad is not None
            assert its.grad is not None
            assert torch.equal(mine.grad, its.grad)


def test_plans_see_all_blocks() -> None:
    """Wide and narrow ones, encoder and decoder."""
    for name, sizes in plan.SIZES.items():
        model = plan.Model(plan.layers_of(name, sizes))
        blocks = [m for m in model.layers if isinstance(m, plan.Block)]
        step = Step(model, (), None, who="plan")
        assert len(blocks_of(step, plan.Block, "cpu")) == len(blocks) >= sizes.layers


@pytest.mark.parametrize("name", sorted(plan.SIZES))
def test_peaks_count_what_budgets_count(name: str) -> None:
    """Else a setting by hand would have room that the plan beside it lacks. Of a kernel's scratch a
    plan counts a bound, which it names.
    """
    torch.manual_seed(0)
    sizes = plan.SMALLEST[name]
    model = plan.Model(plan.layers_of(name, sizes))
    x = torch.randn(sizes.rows, sizes.tokens, sizes.width)
    found = memopt.plan(model, x, 1 << 50, optimizer=None, blocks=plan.Block, steps=1)
    assert found.trace is not None
    assign(model, found.assignment)
    assert (
        found.peak - found.trace.peak.margin
        <= plan.way(model, x, plan.step(model, x)).peak
        <= found.peak
    )
