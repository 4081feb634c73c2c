"""The models of the benchmark of plans: chains of blocks, alike or not, in PyTorch's ops, and their
checkpoints by PyTorch. A model's forward is the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from benchmarks.compile import Block


class Sizes(NamedTuple):
    layers: int
    width: int
    rows: int
    tokens: int


class Wider(nn.Module):
    """Between two levels: half the tokens, twice the width; or back."""

    def __init__(self, width: int, wanted: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, wanted)
        self.down = wanted > width

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, ::2]) if self.down else self.linear(x).repeat_interleave(2, dim=1)


class Decoder(Block):
    """Attends to what the encoder made as well."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.norm = nn.LayerNorm(width)
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.cross = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        assert memory is not None  # a model calls it behind a Turn
        q = self.q(self.norm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(memory).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        return super().forward(x + self.cross(attended.transpose(1, 2).flatten(2)))


class Turn(nn.Module):
    """From the encoder's output to the decoder's input, of a quarter of its tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, ::4]


class Wide(Block):
    """A block whose middle is 16 times as wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.up, self.down = nn.Linear(width, 16 * width), nn.Linear(16 * width, width)


class Mean(nn.Module):
    """The loss."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def layers_of(name: str, sizes: Sizes) -> list[nn.Module]:
    """Blocks, and between levels what changes the width."""
    if name == "chain":
        return [Block(sizes.width, 4) for _ in range(sizes.layers)]
    if name == "wide and narrow":
        return [(Wide if place % 2 else Block)(sizes.width, 4) for place in range(sizes.layers)]
    if name == "encoder-decoder":
        encoder = [Block(sizes.width, 4) for _ in range(sizes.layers // 2)]
        decoder = [Decoder(sizes.width, 4) for _ in range(sizes.layers // 2)]
        return [*encoder, Turn(), *decoder]
    widths = [sizes.width << level for level in range(sizes.layers // 2)]
    way = [*widths, 2 * widths[-1], *reversed(widths)]
    layers: list[nn.Module] = []
    for width, following in zip(way, [*way[1:], None], strict=True):
        layers += [Block(width, 4), Block(width, 4)]
        if following is not None:
            layers.append(Wider(width, following))
    return layers


class Model(nn.Module):
    """A model whose forward returns the loss."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.mean = Mean()

    def forward(self, x: Tensor) -> Tensor:
        encoded: tuple[Tensor, ...] = ()
        blocks = 0
        for layer in self.layers:
            if isinstance(layer, Turn):
                encoded = (x,)
                x = layer(x)
            elif isinstance(layer, Block):
                x = self.run(blocks, layer, (x, *encoded))
                blocks += 1
            else:
                x = layer(x)
        return self.mean(x)

    def run(self, number: int, block: Block, given: tuple[Tensor, ...]) -> Any:
        return block(*given)


class Every(Model):
    """Each `every`-th block is checkpointed by PyTorch."""

    every = 1

    def run(self, number: int, block: Block, given: tuple[Tensor, ...]) -> Any:
        if number % self.every == 0:
            return checkpoint(block, *given, use_reentrant=False)
        return block(*given)


class Segments(Model):
    """PyTorch's checkpoint_sequential."""

    def forward(self, x: Tensor) -> Tensor:
        count = round(len(self.layers) ** 0.5)
        return self.mean(checkpoint_sequential(self.layers, count, x, use_reentrant=False))
