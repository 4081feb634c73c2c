"""Proves: a model compiled by memopt in DistributedDataParallel, and one sharded by FSDP2, have the
losses, gradients and parameters of the model that is not compiled, within rounding.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import memopt
from tests.distributed.processes import WORLD_SIZE, Pair
from tests.distributed.support import SIZE, Results, batch, train

pytestmark = pytest.mark.slow  # for whichever test starts the processes


def body() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (
        nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE))
        for _ in range(2)
    )
    return nn.Sequential(*layers)


def results(model: nn.Module) -> Results:
    def backward(step: int) -> Tensor:
        loss: Tensor = model(batch(step)).square().mean()
        loss.backward()
        return loss.detach()

    return train(model, backward, steps=2)


def in_ddp(compiled: bool) -> Results:
    torch.compiler.reset()
    model = DistributedDataParallel(body())
    return results(memopt.compile(model) if compiled else model)


def in_fsdp(compiled: bool) -> Results:
    torch.compiler.reset()
    model, mesh = body(), init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    if compiled:
        for layer in model:
            layer.compile(options=memopt.compile.options())
    return results(model)


@pytest.mark.parametrize("run", [in_ddp, in_fsdp])
def test_compiled(run: object, pair: Pair) -> None:
    for actual, expected in zip(pair.run(run, True), pair.run(run, False), strict=True):
        assert len(actual.tensors) == len(expected.tensors) > 10
        for a, e in zip(actual.tensors, expected.tensors, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-6)
