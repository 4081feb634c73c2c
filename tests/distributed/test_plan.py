"""Proves: on several ranks all take one plan, for the least budget and the most that any rank
measures; under DistributedDataParallel and FSDP2 it is kept on each of them, with the gradients of
the same ops without regions.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import memopt
from memopt.applied import assigned
from tests.distributed.processes import WORLD_SIZE, Pair
from tests.plan.models import Chain, tokens
from tests.plan.support import looks, without_regions

pytestmark = pytest.mark.slow  # for whichever test starts the processes


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = Chain([4] * 4)
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def gradients(model: nn.Module, ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(ids).backward()
    found = []
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        found.append(whole.clone())
    model.zero_grad()
    return found


def planned(kind: str, share: float) -> dict[str, Any]:
    """Each rank has another number of rows, and another budget."""
    rank = dist.get_rank()
    model, ids = model_of(kind), tokens(4 + 2 * rank, 64)
    before = looks(model)
    rich = memopt.plan(model, ids, 1 << 30, steps=1)
    plan = rich.within(int(share * rich.plain_peak) + 5000 * rank)
    plan.apply()
    measured = plan.measured_peak
    mine = gradients(model, ids)
    plan.undo()
    inner = model.module if kind == "ddp" else model
    with assigned(inner, without_regions(plan)):
        expected = gradients(model, ids)
    return {
        "choices": [str(block.choice) for block in plan.blocks],
        "budget": plan.budget,
        "peak": plan.peak,
        "measured": measured,
        "equal": all(map(torch.equal, mine, expected)),
        "as before": looks(model) == before,
    }


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp"])
def test_one_plan_for_all(pair: Pair, kind: str) -> None:
    one, other = pair.run(planned, kind, 0.75)
    for key in ("choices", "budget", "peak", "measured"):
        assert one[key] == other[key], key
    assert set(one["choices"]) != {"keep"}
    assert one["measured"] <= one["budget"]
    for found in (one, other):
        assert found["equal"]
        assert found["as before"]


def too_little() -> str:
    model, ids = model_of("plain"), tokens(4, 64)
    try:
        memopt.plan(model, ids, 1000 if dist.get_rank() else 1 << 30, measure=False)
    except memopt.BudgetTooSmall as error:
        return str(error)
    return "planned"


def test_one_rank_without_room_is_all_ranks_error(pair: Pair) -> None:
    """Nobody goes on alone."""
    assert all("the floor, got 1,000 B" in found for found in pair.run(too_little))


def too_little_for_shards(rows: int) -> str:
    model, ids = model_of("fsdp"), tokens(rows, 64)
    try:
        memopt.plan(model, ids, 1000, measure=False)
    except memopt.BudgetTooSmall as error:
        return str(error)
    return "planned"


@pytest.mark.parametrize("rows", [1, 16])
def test_the_floor_of_a_sharded_model(pair: Pair, rows: int) -> None:
    """Its parts are named, with the optimizer's states; remedies, which are predicted, are not."""
    for found in pair.run(too_little_for_shards, rows):
        assert "the floor, got 1,000 B\n  the floor's peak is in " in found
        assert "of optimizer states" in found
        assert "beyond plans" not in found


def other_models() -> str:
    model = Chain([4] * (3 + dist.get_rank()))
    try:
        memopt.plan(model, tokens(), 1 << 30, measure=False)
    except ValueError as error:
        return str(error)
    return "planned"


def test_ranks_with_other_models(pair: Pair) -> None:
    assert all("got [3, 4] calls of blocks" in found for found in pair.run(other_models))
