"""Models that call their blocks in other ways than a loop does, each with a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.plan.models import Block


class Tower(nn.Module):
    """Blocks one after another."""

    def __init__(self, count: int = 4, features: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(features) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Target(nn.Module):
    """The same blocks give the target, without gradients, and the prediction (V-JEPA, BYOL)."""

    def __init__(self, target_first: bool) -> None:
        super().__init__()
        self.tower, self.target_first = Tower(), target_first

    def forward(self, x: Tensor) -> Tensor:
        if not self.target_first:
            found = self.tower(x[:, ::2])
        with torch.no_grad():
            target = self.tower(x)
        if self.target_first:
            found = self.tower(x[:, ::2])
        return (found - target[:, ::2]).square().mean()


class Teacher(nn.Module):
    """A copy of the student is only ever called without gradients, and is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Tower(), Tower().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return (self.student(x) - target).square().mean()


class Siamese(nn.Module):
    """Both inputs pass every block."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.tower = Tower(count)

    def forward(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, dim=1)
        return (self.tower(one) - self.tower(other)).square().mean()


class Crops(nn.Module):
    """Large crops, and small ones of another shape; the teacher sees the large ones (DINO)."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Tower(), Tower().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x).mean(1)
        found = [self.student(crop).mean(1) for crop in (x, x[:, :12], x[:, 12:24])]
        return torch.stack([(one - target).square().mean() for one in found]).sum()


class TwoPasses(nn.Module):
    """A generator's output passes the discriminator detached, and once more with its graph; and the
    calls of a block have neighbours of their own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = Tower(3), Tower(3)

    def forward(self, x: Tensor) -> Tensor:
        made = self.generator(x)
        real = self.discriminator(x).square().mean()
        fake = self.discriminator(made.detach().tanh()).square().mean()
        return real - fake + self.discriminator(made).mean()


class Heads(nn.Module):
    """Four MLPs beside a token for each, behind layers of their own, as in SAM's mask decoder."""

    def __init__(self, features: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(4, features)
        self.layers = nn.ModuleList(Block(features) for _ in range(layers))
        self.heads = nn.ModuleList(Block(features) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        marks = self.tokens.weight
        return torch.stack([head(x + marks[n]) for n, head in enumerate(self.heads)])


class Segmenter(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.stem, self.decoder = nn.Linear(16, 16), Heads(layers=layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.stem(x)).square().mean()


class Single(nn.Module):
    """One block, given in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([Block(16)])
        self.again = nn.ModuleList([self.first[0]])

    def forward(self, x: Tensor) -> Tensor:
        return self.again[0](self.first[0](x)).square().mean()


class Nested(nn.Module):
    """Blocks that return more than tensors, some frozen, some in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Tagged(16) for _ in range(4))
        self.blocks[0].requires_grad_(False)
        self.blocks[1].eval()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)["out"][0]
        return x.square().mean()


class _Tagged(Block):
    def forward(self, x: Tensor) -> Any:
        return {"out": (super().forward(x), "text", 3), "none": None}


def batch() -> Tensor:
    return torch.randn(4, 32, 16, generator=torch.Generator().manual_seed(1))


class Forces(nn.Module):
    """Differentiates an energy in its forward, which cannot run without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower(2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.tower(x).square().mean()
        (forces,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy + forces.square().sum()


STRANGERS: dict[str, Callable[[], nn.Module]] = {
    "target first": lambda: Target(True),
    "target last": lambda: Target(False),
    "teacher": Teacher,
    "siamese": Siamese,
    "crops": Crops,
    "two passes": TwoPasses,
    "heads": Segmenter,
    "heads alone": lambda: Segmenter(layers=0),
    "single": Single,
    "nested": Nested,
}


class InLoop(Tower):
    """The loop calls the blocks under torch.utils.checkpoint (stable-audio)."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.reentrant = nn.Linear(16, 16), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x.square().mean()


class _Inside(Block):
    """A block that checkpoints all of itself (guided diffusion), by its own function."""

    def forward(self, x: Tensor) -> Tensor:
        return _RunAgain.apply(super().forward, x, *self.parameters())


class _RunAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.run, ctx.parameters = run, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            output = ctx.run(x)
        return None, *torch.autograd.grad(output, (x, *ctx.parameters), gradient)


class OfBlocks(nn.Module):
    def __init__(self, block: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(block(16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Partly(Block):
    """A block that runs its widest part again itself."""

    keeps_state = False
    """Whether PyTorch's checkpoint holds the state of the generator from forward to backward."""

    def forward(self, x: Tensor) -> Tensor:
        y, keeps = self.norm(x), self.keeps_state
        wide = checkpoint(self.up, y, use_reentrant=False, preserve_rng_state=keeps)
        return x + self.down(self.activation(wide))


class PartlyWithState(Partly):
    keeps_state = True


def wrapped() -> nn.Module:
    """By PyTorch's own wrapper."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torch_wrapper

    return OfBlocks(lambda width: torch_wrapper.checkpoint_wrapper(Block(width)))


CHECKPOINTED: dict[str, Callable[[], nn.Module]] = {
    "in a loop": lambda: InLoop(False),
    "in a loop, reentrant": lambda: InLoop(True),
    "inside blocks": lambda: OfBlocks(_Inside),
    "PyTorch's wrapper": wrapped,
}
