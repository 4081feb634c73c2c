"""Proves: under autocast, every second float32 residual sum keeps what its branch returned, in 16
bits, and not itself; gradients have the same bits; and nothing is kept that somebody else could
write in place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.memory.allocator import LiveBytes
from tests.convert.support import one_step

WIDTH, TOKENS = 32, 48


class Block(nn.Module):
    def __init__(self, post: bool = False) -> None:
        super().__init__()
        self.post = post
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def mlp(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return output

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.first(x + self.mix(x))
            return self.second(self.mlp(x) + x)
        x = x + self.mix(self.first(x))
        return torch.add(self.mlp(self.second(x)), x)


def model_of(blocks: int, post: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(post) for _ in range(blocks)), nn.LayerNorm(WIDTH))


def step(model: nn.Module, around: Callable[[], AbstractContextManager[None]]) -> list[Tensor]:
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16), around():
            output: Tensor = model(x)
        return output

    return one_step(run, x, *model.parameters())


def bytes_of(model: nn.Module) -> float:
    """That grow with the tokens, for each token and column."""

    def saved(tokens: int) -> int:
        with torch.autocast("cpu", torch.bfloat16):
            return int(memopt.saved_bytes(model, torch.randn(tokens, WIDTH, requires_grad=True)))

    norms = sum(isinstance(module, nn.LayerNorm) for module in model.modules())
    return ((saved(48) - saved(32)) / 16 - 8 * norms) / WIDTH


# mix's input has a recipe; gelu's input is 2 * 2 bytes.
@pytest.mark.parametrize(
    ("blocks", "sums"), [(1, 4 + 2 + 4), (2, 2 * (4 + 2) + 4), (5, 5 * (4 + 2) + 4)]
)
def test_every_second_sum_keeps_its_branch(blocks: int, sums: int) -> None:
    model = model_of(blocks)
    without = copy.deepcopy(model)
    memopt.convert(model)
    memopt.convert(without, functional=False)
    assert bytes_of(model) == sums + 4 * blocks
    # Nor is a recipe made of gelu's output there.
    assert bytes_of(without) == 4 * (2 * blocks + 1) + 8 * blocks


HOOKS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "alone": nullcontext,
    "save_on_cpu around": lambda: torch.autograd.graph.save_on_cpu(),
    "recipes around": memopt.recipes,
}


@pytest.mark.parametrize("post", [False, True], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("around", HOOKS.values(), ids=HOOKS)
def test_gradients_have_the_same_bits(
    around: Callable[[], AbstractContextManager[None]], post: bool
) -> None:
    model = model_of(4, post)
    kept = copy.deepcopy(model)
    memopt.convert(model)
    memopt.convert(kept, recipes=False)
    with memopt.convert.functions():
        expected = step(kept, nullcontext)
    for ours, theirs in zip(step(model, around), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "options", [{"checkpoint": Block}, {"checkpoint": Block, "offload": "cpu"}], ids=str
)
def test_regions_hold_no_branch(options: dict[str, type]) -> None:
    model = model_of(3)
    kept = copy.deepcopy(model)
    memopt.convert(model, **options)
    memopt.convert(kept)
    statistics = 8 * 6 / WIDTH  # of the norms inside, which are not kept
    assert bytes_of(model) == 4 * (3 + 1) - statistics
    for ours, theirs in zip(step(model, nullcontext), step(kept, nullcontext), strict=True):
        assert torch.equal(ours, theirs)


class Writes(nn.Module):
    """Writes over what its branch returned, or a view of it, after the sum was saved."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.view = view
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.mix(self.first(x))
        sum = x + branch
        if self.view:
            branch = branch.detach()[1:]
        y: Tensor = self.second(sum)
        with torch.no_grad():
            branch.zero_()
        return y


@pytest.mark.parametrize("view", [False, True])
def test_a_branch_that_others_hold_may_be_written(view: bool) -> None:
    torch.manual_seed(0)
    model = Writes(view)
    plain = copy.deepcopy(model)
    memopt.convert(model)
    memopt.convert(plain, recipes=False)
    for ours, theirs in zip(step(model, nullcontext), step(plain, nullcontext), strict=True):
        assert torch.equal(ours, theirs)


class Adds(nn.Module):
    """Sums that nothing saves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, live: LiveBytes) -> Tensor:
        y = self.norm(x)
        for _ in range(6):
            x = x + self.mix(y)
            live.mark()
        return x


def test_of_sums_that_nothing_saves_one_branch_is_held_for_a_while() -> None:
    model = Adds()
    memopt.convert(model)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), LiveBytes() as live:
        output = model(x, live)
        live.mark()
    *inside, after = (instant.nbytes for instant in live.marks[-6:])
    assert max(inside) - min(inside) == output.numel() * 2
    assert after == min(inside) - x.nbytes  # y


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "of one dtype": lambda x: x + x,
    "broadcast": lambda x: x + x[:1].bfloat16(),
    "scaled": lambda x: torch.add(x, x.bfloat16(), alpha=2),
    "a number": lambda x: x + 1,
    "of 8 bits": lambda x: x + torch.ones(TOKENS, WIDTH, dtype=torch.int8),
    "of 16 bits, integers": lambda x: x + torch.ones(TOKENS, WIDTH, dtype=torch.int16),
}


@pytest.mark.parametrize("add", OTHERS.values(), ids=OTHERS)
def test_other_sums_are_kept_as_they_are(add: Callable[[Tensor], Tensor]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.first(x) + self.second(add(x))
            return output

    model = Net()
    plain = copy.deepcopy(model)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    memopt.convert(model)
    memopt.convert(plain, functional=False)
    assert memopt.saved_bytes(model, x) == memopt.saved_bytes(plain, x)
    expected = one_step(lambda: plain(x), x, *plain.parameters())
    for ours, theirs in zip(
        one_step(lambda: model(x), x, *model.parameters()), expected, strict=True
    ):
        assert torch.equal(ours, theirs)


class KeepsOneByName(Block):
    """As transformers' GPT-2 has it: the first branch's result has a name until the block ends."""

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(self.first(x))
        x = mixed + x
        return x + self.mlp(self.second(x))


def test_a_sum_whose_branch_is_held_elsewhere_is_kept_and_the_next_is_not() -> None:
    model = nn.Sequential(*(KeepsOneByName() for _ in range(3)), nn.LayerNorm(WIDTH))
    memopt.convert(model)
    # The input, the first sums; gelu's inputs; the second sums, which become the branches.
    assert bytes_of(model) == 4 * (1 + 3) + 4 * 3 + 2 * 3


def test_backward_twice_and_gradients_of_gradients() -> None:
    model = model_of(2)
    kept = copy.deepcopy(model)
    memopt.convert(model)
    memopt.convert(kept, recipes=False)
    found = []
    for each in (model, kept):
        x = torch.ones(4, WIDTH).cumsum(0).sin().requires_grad_()
        with memopt.convert.functions(), torch.autocast("cpu", torch.bfloat16):
            y = each(x)
        first = torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]
        again = torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0]
        second = torch.autograd.grad(first.square().sum(), x)[0]
        found.append((first.detach(), again, second))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
