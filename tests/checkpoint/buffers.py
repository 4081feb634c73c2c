"""What the tests of checkpoint_buffers share: a model whose blocks' inputs nothing else holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import memopt
from memopt._checkpoint import checkpoint_wrapper
from memopt._extension import _C
from tests.checkpoint.support import (
    collector_disabled,
    live_tensors_and_regions,
    mlp,
    step_results,
)

WIDTH, BLOCKS = 32, 5


class Model(nn.Module):
    """Blocks whose inputs nothing else holds: BLOCKS of them, of rows * WIDTH floats each."""

    def __init__(self, block: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        make = block if block is not None else lambda: mlp(WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([make() for _ in range(BLOCKS)])

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, *args)
        return x


def wrapped(block: Callable[[], nn.Module] | None = None, kind: type[Model] = Model) -> Model:
    torch.manual_seed(0)
    model = kind(block)
    for module in model.blocks:
        checkpoint_wrapper(module)
    return model


def batch(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))


def train(model: nn.Module, rows: int, *args: Any) -> list[Tensor | None]:
    return step_results(lambda: model(batch(rows), *args), model.parameters())


def plain(model: nn.Module, rows: int, *args: Any) -> list[Tensor | None]:
    with memopt.checkpoint.disable():
        return train(model, rows, *args)


def row(buffers: memopt.types.CheckpointBuffers) -> Any:
    (found,) = buffers.stats()
    return found


def input_bytes(rows: int) -> int:
    return rows * WIDTH * 4


@contextmanager
def nothing_left() -> Iterator[None]:
    with collector_disabled():
        before = (*live_tensors_and_regions(), _C.live_handles())
        yield
        assert (*live_tensors_and_regions(), _C.live_handles()) == before
