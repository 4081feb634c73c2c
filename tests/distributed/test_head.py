"""Proves: a model whose logits are lazy has in DistributedDataParallel and under fully_shard
the losses and gradients of the plain model, whether the loss is computed inside the model or
outside, with find_unused_parameters and a static graph, and with a head that is sharded alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import memopt
from memopt._head.call import watched_heads
from tests.distributed.processes import WORLD_SIZE, Pair

pytestmark = pytest.mark.slow  # for whichever test starts the processes

WORDS, WIDTH = 12, 4


class Decoder(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = inside
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.inner(self.embed(words)))
        return loss_of(logits, words) if self.inside else logits


def loss_of(logits: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(logits[:-1], words[1:])


def wrapped(model: nn.Module, way: str) -> nn.Module:
    if way == "DDP":
        return DistributedDataParallel(model)
    if way == "DDP, unused":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if way == "DDP, static":
        return DistributedDataParallel(model, static_graph=True)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    if way == "FSDP2, head alone":
        fully_shard(model.head, mesh=mesh)  # type: ignore[arg-type]
    return fully_shard(model, mesh=mesh)


def train(way: str, inside: bool, lazy: bool) -> tuple[list[Tensor], int]:
    """Losses and gradients of two steps, and how many losses were of chunks."""
    rank = dist.get_rank()
    model: Any = Decoder(inside)
    if lazy:
        memopt.convert(model, recipes=False)
    model = wrapped(model, way)
    found: list[Tensor] = []
    with watched_heads() as uses:
        for seed in range(2):
            words = torch.arange(7) * (rank + 3 + seed) % WORDS
            output = model(words)
            loss = output if inside else loss_of(output, words)
            loss.backward()
            found.append(loss.detach())
            for parameter in model.parameters():
                grad = parameter.grad
                found.append(grad.full_tensor() if isinstance(grad, DTensor) else grad.clone())
            model.zero_grad()
    return found, sum(use.losses for use in uses)


WAYS = ["DDP", "DDP, unused", "DDP, static", "FSDP2", "FSDP2, head alone"]


@pytest.mark.parametrize("inside", [True, False], ids=["loss inside", "loss outside"])
@pytest.mark.parametrize("way", WAYS)
def test_lazy_logits_on_several_ranks(pair: Pair, way: str, inside: bool) -> None:
    ours = pair.run(train, way, inside, True)
    theirs = pair.run(train, way, inside, False)
    for (mine, losses), (plain, _) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain)
        assert losses == 2 or not inside or way == "FSDP2, head alone"
