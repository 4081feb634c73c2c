"""Proves that the arithmetic of the benchmark of sequences is that of a step: of layers between
others, of each way, and of what the allocator counts in a small model of the same shape.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memopt
from benchmarks import longest_sequence as bench
from tests.plan.support import allocated_above

LENGTH = 64
SMALL = bench.Shape(
    "full",
    hidden=32,
    inner=96,
    layers=6,
    heads=4,
    key_heads=2,
    words=700,
    dtype=torch.float32,
    device="cpu",
    target="cpu",
    with_optimizer=False,
)


@pytest.fixture(scope="module")
def ways() -> dict[str, bench.Way]:
    pytest.importorskip("transformers")
    return {name: bench.way_of(SMALL, name) for name in bench.WAYS}


@pytest.mark.slow
@pytest.mark.parametrize("name", bench.WAYS)
def test_layers_between_add_what_a_step_with_them_has(
    ways: dict[str, bench.Way], name: str
) -> None:
    less, more = (ways[name].predicted(layers, LENGTH) for layers in bench.FEW)
    whole = ways[name].predicted(SMALL.layers, LENGTH)
    assert bench.deeper(less, more, SMALL.layers) == whole
    assert bench.above_of(whole.stages) == whole.above
    assert bench.offloading(whole) >= whole.base


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in bench.WAYS if n not in bench.AWAY])
def test_a_step_that_runs_has_the_peak(ways: dict[str, bench.Way], name: str) -> None:
    """By its ledger in every byte; the allocator's own count differs by what PyTorch's checkpoint
    keeps of random numbers, and by what memopt's ops write over.
    """
    way, step = ways[name], bench.step_of(SMALL, SMALL.layers, LENGTH)
    model: Any = step.model
    way.put_on(model)
    found = memopt.anatomy(model, step.batch, optimizer=None, measure=True)
    assert found.measured is not None
    assert found.measured.peak.total == way.peak(LENGTH)
    base = sum(p.nbytes for p in model.parameters()) + step.batch["input_ids"].nbytes
    counted = base + allocated_above(model, step.batch)
    assert counted == pytest.approx(way.peak(LENGTH), rel=0.03)


def test_the_table_has_a_row_for_each_way() -> None:
    cases = {
        f"{way}/{device}": {"training": "full", "way": way, "device": device, "tokens": 2048}
        for way in bench.WAYS
        for device in bench.DEVICES
    }
    lines = bench.tables({"cases": cases}).splitlines()
    assert len(lines) == 2 + len(bench.WAYS)
    assert "2,048" in lines[-1]
