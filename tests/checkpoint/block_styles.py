"""Models in the styles in which people write blocks, and the paths of the blocks that they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

SIZE = 6


class Attention(nn.Module):
    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.qkv = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(torch.softmax(q @ k.mT, -1) @ v)


class FeedForward(nn.Module):
    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Block(nn.Module):
    def __init__(self, size: int = SIZE, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.attention = Attention(size)
        self.mlp = mlp or FeedForward(size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.attention(self.norm(x)))


class MambaBlock(FeedForward):
    """Of another class than its neighbours."""


class Experts(nn.Module):
    """More experts than the models below have layers."""

    def __init__(self, size: int = SIZE, experts: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(size, experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(size) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return sum(weights[..., i, None] * e(x) for i, e in enumerate(self.experts))


class Heads(nn.Module):
    """An attention whose heads are a list of modules."""

    def __init__(self, size: int = SIZE, heads: int = 3) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Attention(size) for _ in range(heads))

    def forward(self, x: Tensor) -> Tensor:
        return sum(head(x) for head in self.heads)


class Tower(nn.Module):
    """Calls what the containers hold, one after the other."""

    def __init__(self, *blocks: nn.Module | Iterable[nn.Module], size: int = SIZE) -> None:
        super().__init__()
        self.stem = nn.Linear(SIZE, size)
        self.blocks = blocks[0] if isinstance(blocks[0], nn.Module) else nn.ModuleList(*blocks)
        self.head = nn.Linear(size, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(run(self.blocks, self.stem(x)))


def run(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, nn.ModuleDict):
        module = nn.ModuleList(module.values())
    if isinstance(module, nn.ModuleList):
        for element in module:
            x = run(element, x)
        return x
    return module(x)


class Stage(nn.Module):
    """Wider than the one before."""

    def __init__(self, inside: int, outside: int, depth: int) -> None:
        super().__init__()
        self.down = nn.Linear(inside, outside)
        self.blocks = nn.ModuleList(Block(outside) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        return run(self.blocks, self.down(x))


class NumberedStage(nn.Module):
    """timm's RegNet: no list, but children of one class."""

    def __init__(self, parts: Iterable[nn.Module], prefix: str = "b") -> None:
        super().__init__()
        for i, part in enumerate(parts, 1):
            self.add_module(f"{prefix}{i}", part)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return x


class NumberedNet(nn.Module):
    """Stages without a list either, which are no blocks."""

    def __init__(self, depths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Linear(SIZE, SIZE)
        for i, depth in enumerate(depths, 1):
            self.add_module(f"s{i}", NumberedStage(blocks(depth)))

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return x


class ResidualBlock(nn.Module):
    """The first of a list has a projection more. Its layers are a list of alike modules."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.shortcut = nn.Linear(inside, outside) if inside != outside else None
        self.layers = nn.Sequential(FeedForwardTo(inside, outside), FeedForwardTo(outside, outside))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + (x if self.shortcut is None else self.shortcut(x))


class FeedForwardTo(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inside, outside)
        self.norm = nn.LayerNorm(outside)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).relu()


class Towers(nn.Module):
    def __init__(self, towers: nn.Module) -> None:
        super().__init__()
        self.towers = towers

    def forward(self, x: Tensor) -> Tensor:
        return sum(tower(x) for tower in self.towers.children())


class Alternating(nn.Module):
    """lucidrains' style: attention and feed-forward take turns in one loop."""

    def __init__(self, depth: int = 3, norms: bool = False) -> None:
        super().__init__()
        norm = [nn.ModuleList([nn.LayerNorm(SIZE)])] if norms else []
        self.layers = nn.ModuleList(
            nn.ModuleList([*norm, Attention(), FeedForward()]) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for *norms, attention, feed_forward in self.layers:
            x = run(nn.ModuleList(norms), x)
            x = feed_forward(attention(x) + x)
        return x


def blocks(number: int, size: int = SIZE) -> list[nn.Module]:
    return [Block(size) for _ in range(number)]


def paths(pattern: str, *numbers: int) -> list[str]:
    return [pattern.format(i) for n in numbers for i in range(n)]


# The model, and the paths of its blocks.
STYLES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "list": (lambda: Tower(blocks(3)), paths("blocks.{}", 3)),
    "sequential": (lambda: Tower(nn.Sequential(*blocks(3))), paths("blocks.{}", 3)),
    "dict": (
        lambda: Tower(nn.ModuleDict({f"h{i}": Block() for i in range(3)})),
        paths("blocks.h{}", 3),
    ),
    "one block": (lambda: Tower(blocks(1)), ["blocks.0"]),
    "more experts than layers": (
        lambda: Tower([Block(mlp=Experts()) for _ in range(2)]),
        paths("blocks.{}", 2),
    ),
    "experts in some of the layers": (
        lambda: Tower([Block(), Block(mlp=Experts(experts=4)), Block(mlp=Experts())]),
        paths("blocks.{}", 3),
    ),
    "one layer of experts": (
        lambda: Tower([Block(mlp=Experts())]),
        paths("blocks.0.mlp.experts.{}", 8),
    ),
    "heads in every layer": (
        lambda: Tower([Block(mlp=Heads()), Block(mlp=Heads(heads=2)), Block()]),
        paths("blocks.{}", 3),
    ),
    "two kinds of layers": (
        lambda: Tower([MambaBlock(), MambaBlock(), Block(), MambaBlock()]),
        paths("blocks.{}", 4),
    ),
    "blocks between layers": (
        lambda: Tower(
            nn.Sequential(nn.LayerNorm(SIZE), Block(), nn.Tanh(), Block(), nn.Linear(SIZE, SIZE))
        ),
        ["blocks.1", "blocks.3"],
    ),
    "two towers": (
        lambda: Towers(nn.Sequential(Tower(blocks(2)), Tower(nn.Sequential(*blocks(5))))),
        [*paths("towers.0.blocks.{}", 2), *paths("towers.1.blocks.{}", 5)],
    ),
    "a dict of towers": (
        lambda: Towers(
            nn.ModuleDict({"image": Tower(blocks(3, 8), size=8), "text": Tower(blocks(2))})
        ),
        [*paths("towers.image.blocks.{}", 3), *paths("towers.text.blocks.{}", 2)],
    ),
    "stages": (
        lambda: Tower(
            nn.Sequential(Stage(6, 6, 2), Stage(6, 8, 1), Stage(8, 10, 4), Stage(10, 6, 2))
        ),
        [f"blocks.{i}.blocks.{j}" for i, depth in enumerate((2, 1, 4, 2)) for j in range(depth)],
    ),
    "stages of one width": (
        lambda: Tower([Stage(6, 6, 2), Stage(6, 6, 2), Stage(6, 6, 3)]),
        [f"blocks.{i}.blocks.{j}" for i, depth in enumerate((2, 2, 3)) for j in range(depth)],
    ),
    "sequential stages": (
        lambda: Tower(
            nn.Sequential(
                nn.Sequential(ResidualBlock(6, 8), ResidualBlock(8, 8)),
                nn.Sequential(ResidualBlock(8, 10), ResidualBlock(10, 10), ResidualBlock(10, 10)),
                nn.Sequential(ResidualBlock(10, 6), ResidualBlock(6, 6)),
            )
        ),
        [f"blocks.{i}.{j}" for i, depth in enumerate((2, 3, 2)) for j in range(depth)],
    ),
    "numbered children": (
        lambda: NumberedNet((2, 1, 3)),
        ["s1.b1", "s1.b2", "s2", "s3.b1", "s3.b2", "s3.b3"],
    ),
    "numbered children of a model": (lambda: NumberedStage(blocks(3)), paths("b{}", 4)[1:]),
    "numbered towers": (
        lambda: NumberedStage([Tower(blocks(2)), Tower(blocks(3))], "tower"),
        [*paths("tower1.blocks.{}", 2), *paths("tower2.blocks.{}", 3)],
    ),
    "alike sequentials": (
        lambda: Tower(nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(2)))),
        ["blocks.0", "blocks.1"],
    ),
}
