"""Proves, for random trees of modules (containers, residuals, functional code, shared modules and
shared activations, hooks, regions of memopt's and PyTorch's, methods other than forward): converted
they compute what they did within rounding, by whichever entry; no entry saves a byte more; and
reverted they are what they were.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

import memopt
from memopt.memory.saved import SavedTensors
from tests.convert import modules
from tests.convert.support import state

WIDTH, ROWS = 8, 6
SHARED_GELU, SHARED_RELU = nn.GELU(), nn.ReLU()

LEAVES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(WIDTH, WIDTH),
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "ReLU": nn.ReLU,
    "Sigmoid": nn.Sigmoid,
    "Tanh": nn.Tanh,
    "ReLU in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "Dropout": lambda: nn.Dropout(0.0),
    "a GELU of all": lambda: SHARED_GELU,
    "a ReLU of all": lambda: SHARED_RELU,
    "own swish": modules.OwnSwish,
    "own norm": lambda: OwnNorm(),
    "gated": lambda: modules.FeedForward(WIDTH, WIDTH),
    **{f"F.{name}": lambda name=name: Functional(name) for name in ("gelu", "silu", "relu")},
    **{f"x.{name}()": lambda name=name: Functional(name) for name in ("sigmoid", "tanh")},
    "F.layer_norm": lambda: Functional("layer_norm"),
    "F.rms_norm": lambda: Functional("rms_norm"),
    "F.dropout": lambda: Functional("dropout"),
}


class OwnNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, True) + self.eps).rsqrt() * self.scale


class Functional(nn.Module):
    """Functions between linears, and one of them without a module around."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def function(self, x: Tensor) -> Tensor:
        if self.name in ("layer_norm", "rms_norm"):
            return getattr(F, self.name)(x, (WIDTH,))  # type: ignore[no-any-return]
        if self.name == "dropout":
            return F.dropout(x, 0.5, training=False) + F.dropout(x, 0.0)
        if self.name in ("sigmoid", "tanh"):
            return getattr(x, self.name)()  # type: ignore[no-any-return]
        return getattr(F, self.name)(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.down(self.function(self.up(x))))


class Around(nn.Module):
    """One way to call a part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        output: Tensor = self.part(x)
        return output


class Residual(Around):
    def run(self, x: Tensor) -> Tensor:
        return x + super().run(x)


class Twice(Around):
    def run(self, x: Tensor) -> Tensor:
        output: Tensor = self.part(self.part(x))
        return output


class Product(Around):
    def run(self, x: Tensor) -> Tensor:
        return super().run(x) * torch.sigmoid(x)


class Bound(Around):
    """Calls what it bound when it was made."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__(part)
        self.function = part.forward

    def run(self, x: Tensor) -> Tensor:
        output: Tensor = self.function(x)
        return output


class Listed(nn.Module):
    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Region(Around):
    def run(self, x: Tensor) -> Tensor:
        output: Tensor = memopt.checkpoint(self.part, x)
        return output


class OfAMethod(Around):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = torch_checkpoint.checkpoint(self.run, x, use_reentrant=False)
        return output


class OfAFunction(Around):
    def run(self, x: Tensor) -> Tensor:
        output: Tensor = torch_checkpoint.checkpoint(
            lambda x: F.gelu(self.part(F.relu(x))), x, use_reentrant=False
        )
        return output


class Hooked(Around):
    def __init__(self, part: nn.Module) -> None:
        super().__init__(nn.Sequential(part))
        self.part.register_forward_hook(_double)
        self.register_forward_pre_hook(_double_argument)


def _double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def _double_argument(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] * 2,)


AROUND = (
    *(Residual, Twice, Product, Bound, Around, Hooked),
    *(Region, OfAMethod, OfAFunction, memopt.checkpoint_wrapper),
)

Builder = Callable[[], nn.Module]
trees: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(sorted(LEAVES)),
    lambda parts: (
        st.tuples(st.sampled_from(AROUND), parts)
        | st.tuples(
            st.sampled_from((Listed, nn.Sequential)), st.lists(parts, min_size=1, max_size=4)
        )
    ),
    max_leaves=8,
)


def build(tree: Any) -> nn.Module:
    if isinstance(tree, str):
        return LEAVES[tree]()
    around, parts = tree
    if around is nn.Sequential:
        return nn.Sequential(*map(build, parts))
    if around is Listed:
        return Listed([build(part) for part in parts])
    if around is memopt.checkpoint_wrapper:
        return memopt.checkpoint_wrapper(Around(build(parts)))
    module: nn.Module = around(build(parts))
    return module


class Model(nn.Module):
    def __init__(self, trees: list[Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), build(tree), nn.Linear(WIDTH, WIDTH))
            for tree in trees
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def entry(self, x: Tensor) -> Tensor:
        return self.blocks[0](x).relu() + torch.sigmoid(x)  # type: ignore[no-any-return]

    def children_alone(self, x: Tensor) -> Tensor:
        for child in self.blocks[0]:
            x = child(x)
        return x


def part_by_part(model: Model, x: Tensor) -> Tensor:
    """From outside, so that each part is entered by itself."""
    for block in model.blocks:
        for child in block:
            x = child(x)
    return x


ENTRIES: tuple[Callable[[Any, Tensor], Tensor], ...] = (
    lambda model, x: model(x),
    lambda model, x: model.entry(x),
    lambda model, x: model.children_alone(x),
    lambda model, x: model.blocks[0](x),
    part_by_part,
)


def saved(call: Callable[[], Tensor]) -> int:
    with SavedTensors() as tensors:
        output = call()
    del output
    return int(tensors.bytes)


@settings(deadline=None, max_examples=60)
@given(
    trees=st.lists(trees, min_size=1, max_size=2),
    functional=st.booleans(),
    recipes=st.booleans(),
    seed=st.integers(0, 99),
)
def test_converted_is_the_model_with_no_byte_more(
    trees: list[Any], functional: bool, recipes: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    plain = Model(trees).double()
    model = copy.deepcopy(plain)
    before = state(model)
    memopt.convert(model, functional=functional, recipes=recipes)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    for enter in ENTRIES:
        ours, theirs = saved(lambda: enter(model, x)), saved(lambda: enter(plain, x))  # noqa: B023
        assert ours <= theirs
        results = []
        for each in (model, plain):
            y = enter(each, x)
            tensors = (x, *each.parameters())
            grads = torch.autograd.grad(y.square().sum(), tensors, allow_unused=True)
            results.append([y.detach(), *grads])
        for mine, other in zip(*results, strict=True):
            assert (mine is None) == (other is None)
            if other is not None:
                largest = float(other.abs().max()) + 1
                torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11 * largest)
    memopt.revert(model)
    assert state(model) == before
    assert type(SHARED_GELU) is nn.GELU
    assert type(SHARED_RELU) is nn.ReLU
