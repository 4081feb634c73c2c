"""Proves: a converted model in DistributedDataParallel, sharded by FSDP2 before or after, and with
tensor and sequence parallel parts has the losses, gradients and parameters of the unconverted one
within rounding, and the ops of memopt run wherever tensors are not distributed.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import memopt
from tests.convert.modules import FeedForward, PlainRMSNorm
from tests.convert.support import memopt_ops
from tests.distributed.processes import WORLD_SIZE, Pair
from tests.distributed.support import SIZE, batch, train

pytestmark = pytest.mark.slow  # for whichever test starts the processes


class Run(NamedTuple):
    tensors: list[Tensor | None]
    keys: list[str]
    ops: set[str]
    """Of memopt, in one forward."""


def blocks() -> nn.Sequential:
    """Each ends with a norm whose output the next one saves: sharded, without the norm's weight."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.LayerNorm(SIZE), FeedForward(SIZE), PlainRMSNorm(SIZE), nn.GELU())
            for _ in range(3)
        )
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def results(model: nn.Module, inner: nn.Module) -> Run:
    def backward(step: int) -> Tensor:
        x = batch(step)
        dist.broadcast(x, src=0)
        loss = model(x).square().mean()
        loss.backward()
        return loss

    run = train(model, backward, steps=2)
    ops = set(memopt_ops(lambda: model(torch.ones(4, SIZE))))
    return Run(run.tensors, list(inner.state_dict()), ops)


def data_parallel(convert: str) -> Run:
    inner = blocks()
    if convert == "before":
        memopt.convert(inner)
    model = DistributedDataParallel(inner)
    if convert == "after":
        memopt.convert(model)
    return results(model, inner)


def sharded(convert: str) -> Run:
    model = blocks()
    if convert == "before":
        memopt.convert(model)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if convert == "after":
        memopt.convert(model)
    return results(model, model)


def tensor_parallel(convert: str) -> Run:
    model = blocks()
    if convert == "before":
        memopt.convert(model)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for block in model:
        parallelize_module(
            block,
            mesh,
            {
                "0": SequenceParallel(sequence_dim=0, use_local_output=False),
                "1.w1": ColwiseParallel(input_layouts=Shard(0)),
                "1.w3": ColwiseParallel(input_layouts=Shard(0)),
                "1.w2": RowwiseParallel(),
            },
        )
    if convert == "after":
        memopt.convert(model)
    return results(model, model)


@pytest.mark.parametrize("run", [data_parallel, sharded, tensor_parallel])
@pytest.mark.parametrize("when", ["before", "after"])
def test_two_steps_equal_those_of_the_unconverted_model(pair: Pair, run, when: str) -> None:
    for ours, theirs in zip(pair.run(run, when), pair.run(run, "never"), strict=True):
        assert theirs.ops == set()
        norm = set() if run is tensor_parallel else {"memopt::_norm_forward"}
        expected = {"memopt::_activation_forward", "memopt::_gated_forward", *norm}
        assert expected <= ours.ops
        assert ours.keys == theirs.keys
        for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
