"""What the tests of partitioned regions share: models, gradients, the bytes of gathers."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

from memopt._checkpoint import checkpoint, checkpoint_wrapper
from memopt._extension import _C
from tests.checkpoint.virtual_ranks import Rank, VirtualRanks

ROWS, SIZE = 16, 8
BYTES = ROWS * SIZE * 4
MESSAGE = 64 * 8
"""What a rank tells the others of a module's first call."""


def part_bytes(nbytes: int, ranks: int) -> int:
    """1/ranks of them, rounded up to 16."""
    return -(-nbytes // (16 * ranks)) * 16


def layer(seed: int = 0) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    made = nn.Sequential(nn.Linear(SIZE, 2 * SIZE), nn.Tanh(), nn.Linear(2 * SIZE, SIZE))
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def values(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def body(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(layer(seed) for seed in range(count)))


def wrapped(rank: Rank, count: int = 3, **options: Any) -> nn.Sequential:
    made = body(count)
    for module in made:
        checkpoint_wrapper(module, partition=rank.partition, **options)
    return made


def gradients(model: nn.Module, x: Tensor, backwards: int = 1) -> list[Tensor]:
    x = x.requires_grad_()
    loss = model(x * 1).square().sum()
    for number in range(backwards):
        loss.backward(retain_graph=number + 1 < backwards)
    found = [x.grad, *(p.grad for p in model.parameters())]
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


def assert_nothing_is_left(*ranks: VirtualRanks) -> None:
    gc.collect()
    for all_of in ranks:
        assert _C.live_regions() <= all_of.regions_before
        for rank in all_of.ranks:
            assert rank.partition.native.unfinished() == 0


def starts(ranks: VirtualRanks) -> list[int]:
    """Of the gathers of regions, the bytes; the same on all ranks."""
    first, *others = ([size for size in rank.started if size != MESSAGE] for rank in ranks.ranks)
    assert all(other == first for other in others)
    return first


def contiguous() -> Tensor:
    return values(ROWS, SIZE) * 1


def half() -> Tensor:
    return values(ROWS, SIZE).to(torch.bfloat16)


def recomputed_arguments(rank: Rank, tensors: list[Tensor]) -> list[Tensor]:
    """What a region's recompute gets for `tensors`, which this frees."""
    got: list[list[Tensor]] = []

    def function(x: Tensor, rest: list[Tensor]) -> Tensor:
        got.append(rest)
        return x.exp()

    x = torch.ones(1, requires_grad=True)
    y = checkpoint(function, x, tensors, partition=rank.partition)
    got.clear()
    y.backward()
    return got[0]
