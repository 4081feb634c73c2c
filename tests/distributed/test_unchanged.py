"""Proves: a measurement of a model that FSDP2 shards leaves nothing behind, whether its parameters
are sharded or whole before and after: gradients, buffers, attributes of modules and their classes,
and which parameters are there; and the model trains on as one that was not measured.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from memopt._compat import sharding_groups
from memopt.memory.unchanged import unchanged
from tests.distributed.processes import WORLD_SIZE, Pair
from tests.distributed.support import SIZE, batch

pytestmark = pytest.mark.slow  # for whichever test starts the processes


class Counts(nn.Module):
    """Is sharded itself, and keeps books."""

    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)
        self.register_buffer("mean", torch.zeros(SIZE))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        Counts.total += 1
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        return self.inner(x).tanh()


def made(reshard: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(Counts(), Counts())
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_reshard_after_backward(reshard)
    return model


def step(model: nn.Module) -> Tensor:
    loss: Tensor = model(batch(0, 4)).square().mean()
    loss.backward()
    return loss.detach()


def state(model: nn.Module) -> list[Any]:
    """Of gradients the objects and the bits."""
    sharded = [one.sharded_param for group in sharding_groups(model) for one in group.fsdp_params]
    grads = [one.grad for one in sharded]
    return [
        [id(grad) for grad in grads],
        [grad.full_tensor().tolist() for grad in grads if isinstance(grad, DTensor)],
        [(id(buffer), buffer.tolist()) for buffer in model.buffers()],
        [one.calls for one in model.modules() if isinstance(one, Counts)],
        Counts.total,
    ]


def measured(reshard: bool, before: bool) -> tuple[list[Any], list[Any], bool, list[Tensor]]:
    """What a model and its classes were before and after two measurements; whether each parameter
    is then what FSDP2 takes it for; and losses of it and of another one, a step later.
    """
    model, other = made(reshard), made(reshard)
    if before:
        step(model), step(other)
    was = state(model)
    for _ in range(2):
        with unchanged(model):
            step(model)
    now = state(model)
    agrees = all(
        isinstance(one._module_info.module._parameters[one._module_info.param_name], DTensor)
        != group.is_unsharded
        for group in sharding_groups(model)
        for one in group.fsdp_params
    )
    return was, now, agrees, [step(model), step(other)]


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_a_sharded_model_is_as_it_was(pair: Pair, reshard: bool, before: bool) -> None:
    for was, now, agrees, (loss, expected) in pair.run(measured, reshard, before):
        assert now == was
        assert agrees
        assert torch.equal(loss, expected)
