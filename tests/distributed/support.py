"""What the distributed tests share: counted blocks, and training steps with all their results.

Everything here but the last function runs in both processes of a `Pair`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import memopt
from tests.checkpoint.support import plain
from tests.support.bits import assert_same_bits

SIZE = 8

Region = Literal["none", "wrapper", "function", "disk"]
"""No region; every block wrapped; every block called through `memopt.checkpoint`; wrapped, with its
inputs in a file."""
REGIONS: tuple[Region, ...] = ("wrapper", "function")

Call = Callable[..., Tensor]


class Results(NamedTuple):
    """What one process saw of a training run."""

    tensors: list[Tensor | None]
    """Per step the loss and the gradients, then the parameters and the buffers."""
    calls: int
    """How often forwards of blocks ran, recomputes included."""
    keys: list[str]
    """Of the state_dict."""


class CountingLinear(nn.Linear):
    """Counts its forwards."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def block(dropout: float = 0.0) -> nn.Sequential:
    """Its weights are those of 0 and 3."""
    first, last = CountingLinear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)
    return nn.Sequential(first, nn.Tanh(), nn.Dropout(dropout), last)


def call_of(region: Region) -> Call:
    """How a model calls a block."""
    return memopt.checkpoint if region == "function" else plain


def wrap_for(region: Region, blocks: Iterable[nn.Module]) -> None:
    if region in ("wrapper", "disk"):
        for module in blocks:
            place = Path(tempfile.gettempdir()) if region == "disk" else None
            memopt.checkpoint_wrapper(module, offload=place)


def batch(number: int, rows: int = 4) -> Tensor:
    """Every rank has its own."""
    generator = torch.Generator().manual_seed(1 + 2 * number + dist.get_rank())
    return torch.randn(rows, SIZE, generator=generator)


def train(model: nn.Module, backward: Callable[[int], Tensor], steps: int = 3) -> Results:
    """`steps` optimiser steps; `backward(step)` makes the gradients and gives the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tensors: list[Tensor | None] = []
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(step)  # for dropout
        tensors.append(_whole(backward(step)))
        tensors += [_whole(p.grad) for p in model.parameters()]
        optimizer.step()
    tensors += [_whole(t) for t in (*model.parameters(), *model.buffers())]
    calls = sum(m.calls for m in model.modules() if isinstance(m, CountingLinear))
    return Results(tensors, calls, list(model.state_dict()))


def _whole(tensor: Tensor | None) -> Tensor | None:
    """A copy of all of it, also where each rank holds a part."""
    if tensor is None:
        return None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def assert_recomputes_and_equals(actual: list[Results], expected: list[Results]) -> None:
    """Every rank's run did the same to the last bit, and its blocks ran more often."""
    for a, e in zip(actual, expected, strict=True):
        assert_same_bits(a.tensors, e.tensors)
        assert a.keys == e.keys
        assert a.calls > e.calls > 0
