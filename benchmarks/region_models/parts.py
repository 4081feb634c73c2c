"""Parts that several of the models have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Made = Callable[[], tuple[nn.Module, Any]]
"""Makes a model and a batch for it."""


class InOrder(nn.ModuleList):
    """Called one after another."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


class Residual(nn.Module):
    """Adds the result of the module inside to its input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Attention(nn.Module):
    """Attention of queries to keys and values from elsewhere."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        key, value = self.kv(x if source is None else source).chunk(2, -1)
        split = [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.q(x), key, value)]
        scores = (split[0] @ split[1].mT / split[0].shape[-1] ** 0.5).softmax(-1)
        found: Tensor = self.out((scores @ split[2]).transpose(1, 2).flatten(2))
        return found


def mlp(width: int, factor: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, factor * width), nn.GELU(), nn.Linear(factor * width, width)
    )


class Block(nn.Module):
    """A transformer's, with a norm before each part."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width)
        self.norm2, self.mlp = nn.LayerNorm(width), mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Tower(nn.Module):
    """Blocks behind a linear layer, and a norm."""

    def __init__(self, depth: int = 6, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def conv(dims: int, *args: Any, **kwargs: Any) -> nn.Module:
    return (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](*args, **kwargs)


def batch_norm(dims: int, width: int) -> nn.Module:
    return (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1](width)
