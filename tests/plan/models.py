"""Small models of several shapes, each with a batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import weight_norm


class Block(nn.Module):
    """A residual block whose middle is `width` times as wide."""

    def __init__(self, features: int, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.up = nn.Linear(features, width * features)
        self.activation = nn.GELU()
        self.down = nn.Linear(width * features, features)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


class Chain(nn.Module):
    """Blocks one after another, between an embedding and a head."""

    def __init__(self, widths: Sequence[int], features: int = 32, words: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, features)
        self.blocks = nn.ModuleList(Block(features, width) for width in widths)
        self.head = nn.Linear(features, words)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Spaced(Chain):
    """Between its blocks something runs, so that they share no region."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) * 1.5
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Skipping(Chain):
    """Its second and third blocks are not called, as where layers are dropped at random."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for k, block in enumerate(self.blocks):
            x = x if k in (1, 2) else block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Shared(Chain):
    """The same blocks several times, as in ALBERT."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Ladder(nn.Module):
    """A U-Net of residual blocks: what goes down is wanted again on the way up."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList(Block(features << level, 2) for level in range(3))
        self.wider = nn.ModuleList(
            nn.Linear(features << level, features << (level + 1)) for level in range(2)
        )
        self.narrower = nn.ModuleList(
            nn.Linear(features << (level + 1), features << level) for level in range(2)
        )
        self.up = nn.ModuleList(Block(features << level, 2) for level in range(2))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level, block in enumerate(self.down):
            x = block(x)
            if level < 2:
                skips.append(x)
                x = self.wider[level](x[:, ::2])
        for level in (1, 0):
            x = skips[level] + self.narrower[level](x).repeat_interleave(2, dim=1)
            x = self.up[level](x)
        return x.square().mean()


class Branched(nn.Module):
    """Between the last block of an encoder and the first one of a decoder much is computed that is
    no block's, as in UNETR.
    """

    def __init__(self, features: int = 16) -> None:
        super().__init__()
        self.coarse = nn.ModuleList(Block(features) for _ in range(4))
        self.wider = nn.Linear(features, 24 * features)
        self.narrower = nn.Linear(24 * features, features)
        self.fine = nn.ModuleList(Block(features) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.coarse:
            x = block(x)
        x = x + self.narrower(self.wider(x).tanh())
        for block in self.fine:
            x = block(x)
        return x.square().mean()


def tokens(rows: int = 4, length: int = 64, words: int = 50) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, words, (rows, length), generator=generator)


def chain() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Chain([4] * 6), tokens()


def uneven() -> tuple[Chain, Tensor]:
    torch.manual_seed(0)
    return Chain([1, 8, 2, 8, 1, 4]), tokens()


def shared() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Shared([4, 2]), tokens()


def ladder() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Ladder(), torch.randn(4, 64, 8)


def branched() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Branched(), torch.randn(4, 64, 16)


def normed() -> tuple[nn.Module, Tensor]:
    """Weights are computed before each forward, and stay as attributes of the linears."""
    model, batch = uneven()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # weight_norm has a successor
        for block in model.blocks:
            weight_norm(block.up)
            weight_norm(block.down)
    return model, batch


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "chain": chain,
    "uneven": uneven,
    "shared": shared,
    "ladder": ladder,
    "branched": branched,
    "normed": normed,
}
