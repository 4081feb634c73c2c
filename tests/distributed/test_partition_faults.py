"""Proves: when one rank of a partition raises, in forward, between forward and backward or in a
recompute, or is killed, the others end with an error within their group's timeout, and neither side
keeps a region, a handle or a gather; and that other groups stay usable.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import memopt
from memopt._checkpoint.flags import is_recomputing
from memopt._checkpoint.partition import _partition_of_group
from memopt._extension import _C
from tests.distributed.processes import World
from tests.support.patience import PATIENCE_S, once_it_is

pytestmark = pytest.mark.slow  # for whichever test starts the processes

TIMEOUT_S = 3.0
SIZE = 64

Where = Literal["forward", "between", "recompute", "killed"]


class Fails(nn.Module):
    def __init__(self, where: Where | None) -> None:
        super().__init__()
        self.where, self.linear = where, nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        recomputing = is_recomputing()
        if self.where == "forward" or (self.where == "recompute" and recomputing):
            raise RuntimeError("on purpose")
        if self.where == "killed" and recomputing:
            os._exit(1)
        return self.linear(x).tanh()


def step(where: Where, group: dist.ProcessGroup) -> None:
    is_faulty = dist.get_rank() == 1
    model = nn.Sequential(*(Fails(None) for _ in range(4)))
    model[2].where = where if is_faulty else None
    for module in model:
        memopt.checkpoint_wrapper(module, partition=group)
    x = torch.ones(SIZE, SIZE, requires_grad=True)
    good = model[2].where
    model[2].where = None
    model(x * 1).sum().backward()  # compares the inputs
    model[2].where = good
    loss = model(x * 1).sum()
    if where == "between" and is_faulty:
        raise RuntimeError("on purpose")
    loss.backward()


def report(where: Where) -> dict[str, Any]:
    """What this rank saw of the step, and what it has left."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    assert isinstance(group, dist.ProcessGroup)
    before = _C.live_handles()
    begin, error = time.monotonic(), "none"
    try:
        step(where, group)
    except Exception as caught:
        error = str(caught)
    seconds = time.monotonic() - begin
    partition = _partition_of_group(group)
    assert partition is not None
    native = partition.native
    once_it_is(0, native.unfinished, TIMEOUT_S + PATIENCE_S)
    left = _C.live_regions(), _C.live_handles() - before, native.unfinished()
    return {"error": error, "seconds": seconds, "left": left}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Their own: what happens here is no use to others."""
    world = World(tmp_path_factory.mktemp("faults"), size=2)
    yield world
    world.close()


def sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return float(total)


@pytest.mark.parametrize("where", ["forward", "between", "recompute"])
def test_other_rank_gets_an_error_in_time(two: World, where: Where) -> None:
    other, faulty = two.run(report, where)
    assert faulty["error"] == "on purpose"
    assert other["error"] not in ("none", "on purpose")
    assert other["seconds"] < TIMEOUT_S + PATIENCE_S
    assert other["left"] == faulty["left"] == (0, 0, 0)
    assert two.run(sum_of_ranks) == [1.0, 1.0]


def test_killed_rank_is_an_error_of_the_others(two: World) -> None:
    other, killed = two.run_some_to_their_end(report, "killed")
    assert killed is None
    assert other["error"] != "none"
    assert other["seconds"] < TIMEOUT_S + PATIENCE_S
    assert other["left"] == (0, 0, 0)
