"""Proves that the buckets in which DistributedDataParallel reduces gradients count once, and that
the floor that is named beside them holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import memopt
from tests.anatomy.models import Mlp


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """Of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="PyTorch without torch.distributed")
@pytest.mark.parametrize("as_views", [False, True])
def test_buckets_count_once(group: None, as_views: bool) -> None:
    model, x = Mlp(blocks=3), torch.randn(6, 32)
    alone = memopt.plan(model, x, "10MB", steps=1).apply()
    expected = alone.measured_peak
    alone.undo()
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=as_views)
    parallel(x).backward()  # the first backward arranges the buckets
    parallel.zero_grad()
    plan = memopt.plan(parallel, x, "10MB", steps=1).apply()
    buckets = 0 if as_views else sum(p.nbytes for p in model.parameters())
    assert expected is not None
    assert plan.measured_peak == expected + buckets
    plan.undo()


@pytest.mark.skipif(not dist.is_available(), reason="PyTorch without torch.distributed")
def test_the_floor_with_unused_parameters_is_accepted(group: None) -> None:
    """DDP notes which parameters had gradients, in a tensor that the step reaches in backward."""
    model, x = Mlp(blocks=3), torch.randn(6, 32)
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    with pytest.raises(memopt.BudgetTooSmall) as below:
        memopt.plan(parallel, x, 1000, steps=1, optimizer=None)
    plan = memopt.plan(parallel, x, below.value.floor, steps=1, optimizer=None).apply()
    assert plan.measured_peak is not None
    assert plan.measured_peak <= below.value.floor
    plan.undo()


@pytest.mark.skipif(not dist.is_available(), reason="PyTorch without torch.distributed")
def test_a_plan_is_put_on_the_module_inside(group: None, tmp_path: Path) -> None:
    """Of the model that it was made for, and of another one: it was said to lack the blocks."""
    parallel = nn.parallel.DistributedDataParallel(Mlp(blocks=3))
    plan = memopt.plan(parallel, torch.randn(6, 32), "10MB", measure=False).apply(parallel)
    assert plan.measured_peak is not None
    plan.undo()
    plan.save(tmp_path / "plan.json")
    memopt.Plan.load(tmp_path / "plan.json").apply(parallel).undo()
