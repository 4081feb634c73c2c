"""Proves: modules that a model's own code calls one after another may share one region. It keeps
the first one's arguments, gradients have the bits of the plain step, and whatever the code does
between the calls changes bytes alone.
"""

from __future__ import annotations

import copy
import gc
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt._extension import _C
from memopt.applied import assigned
from memopt.assignment import Assignment, Choice
from tests.plan.support import allocated_above

WIDTH = 16
ROWS = 8
SHARED = Choice(checkpoint=True)
EACH_INSIDE = Choice(checkpoint=True, parts=("",))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.drop, self.down = nn.Dropout(0.5), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Any = None) -> Any:
        scale = scale.scale if isinstance(scale, SimpleNamespace) else scale
        out = x + self.down(self.drop(self.up(self.norm(x)).tanh()))
        return out if scale is None else (out * scale, scale)


class Loop(nn.Module):
    """What runs between the blocks differs."""

    def __init__(self, between: str = "nothing", count: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        scale = self.stem(x).sigmoid() if self.between == "another argument" else None
        states, box = [], SimpleNamespace(scale=torch.ones(()))
        for number, block in enumerate(self.blocks):
            if self.between == "one is skipped" and number == 2:
                continue
            if self.between == "an object with another tensor":
                box.scale = (number + 1) * box.scale
                x, _ = block(x, scale=box)
            elif scale is not None:
                x, scale = block(x, scale=scale)
            else:
                x = block(x)
            if self.between == "a write":
                x.add_(1)
            if self.between == "a write through a view":
                x[:, :2].mul_(2)
            if self.between == "operators":
                x = x * 2
            if self.between == "random numbers":
                torch.rand(1)
            if self.between == "states are collected":
                states.append(x)
        return (x.square().mean() + sum(s.mean() for s in states)).sum()


BETWEEN = (
    "nothing",
    "another argument",
    "a write",
    "a write through a view",
    "an object with another tensor",
    "operators",
    "random numbers",
    "one is skipped",
    "states are collected",
)


def batch(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def paths(model: Loop) -> tuple[str, ...]:
    return tuple(f"blocks.{n}" for n in range(len(model.blocks)))


def after_a_step(model: nn.Module) -> list[Tensor]:
    """Gradients and batch norm's statistics."""
    model = copy.deepcopy(model)
    torch.manual_seed(3)
    model(batch()).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*grads, *model.buffers()]


def same_bits(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("choice", [SHARED, EACH_INSIDE], ids=["shared", "each inside"])
@pytest.mark.parametrize("between", BETWEEN)
def test_bits_are_those_of_the_plain_step(between: str, choice: Choice) -> None:
    torch.manual_seed(0)
    model = Loop(between)
    wanted, live = after_a_step(model), _C.live_regions()
    with assigned(model, Assignment({paths(model): choice})):
        assert same_bits(after_a_step(model), wanted)
        assert same_bits(after_a_step(pickle.loads(pickle.dumps(model))), wanted)
    assert same_bits(after_a_step(model), wanted)
    gc.collect()
    assert _C.live_regions() == live


class Ending(nn.Module):
    """A block that ends in an op with a recipe, or in a sum with one."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self.linear, self.norm, self.end = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), end

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.end == "activation":
            return F.gelu(y)
        if self.end == "norm":
            return self.norm(x + y)
        y = x + self.norm(y)
        return y if self.end == "sum" else y.relu_()


class Chain(nn.Module):
    def __init__(self, end: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Ending(end) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


@pytest.mark.parametrize("end", ["activation", "norm", "sum", "activated sum"])
def test_blocks_that_end_in_a_recipe(end: str) -> None:
    """As those of ResNet and BERT do. The next call saves what they return, in both runs."""
    torch.manual_seed(0)
    model = Chain(end)
    at = tuple(f"blocks.{n}" for n in range(4))
    with assigned(model, Assignment({(path,): Choice(recipes=True) for path in at})):
        wanted = after_a_step(model)
    for inside in ((), ("",)):
        shared = Choice(recipes=True, checkpoint=True, parts=inside)
        with assigned(model, Assignment({at[:2]: shared, at[2:]: shared})):
            assert same_bits(after_a_step(model), wanted)


def test_one_input_is_kept() -> None:
    model = Loop()
    alone = Assignment(dict.fromkeys(paths(model), SHARED))
    with assigned(model, alone):
        in_four = memopt.saved_bytes(model, batch())
    for choice in (SHARED, EACH_INSIDE):
        with assigned(model, Assignment({paths(model): choice})):
            assert memopt.saved_bytes(model, batch()) == in_four - 3 * batch().nbytes


def test_after_operators_a_region_begins_anew() -> None:
    """It keeps what the plain calls would pass on."""
    model = Loop("operators")
    with assigned(model, Assignment(dict.fromkeys(paths(model), SHARED))):
        in_four = memopt.saved_bytes(model, batch())
    with assigned(model, Assignment({paths(model): SHARED})):
        assert memopt.saved_bytes(model, batch()) == in_four


def test_regions_inside_a_region_hold_one_block_at_a_time() -> None:
    """By the allocator: the more blocks, the less a shared region alone helps."""
    torch.manual_seed(0)
    model, rows, peaks = Loop(count=12), 64 * ROWS, {}
    for name, choice in {"shared": SHARED, "inside": EACH_INSIDE}.items():
        with assigned(model, Assignment({paths(model): choice})):
            peaks[name] = allocated_above(model, batch(rows))
    block = 4 * WIDTH * rows * 4  # the middle's bytes, of which each block has some
    assert peaks["inside"] < peaks["shared"] - 8 * block


def test_an_error_in_a_later_block_leaves_nothing_open() -> None:
    torch.manual_seed(0)
    model = Loop()
    wanted, state = after_a_step(model), copy.deepcopy(model.state_dict())
    with assigned(model, Assignment({paths(model): SHARED})):
        down = model.blocks[2].down
        model.blocks[2].down = nn.Linear(1, 1)
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(batch())
        model.blocks[2].down = down
        model.load_state_dict(state)
        before = memopt.saved_bytes(nn.Linear(WIDTH, 2), batch().requires_grad_())
        assert before > 0  # hooks of a region that was left open would drop it
        assert same_bits(after_a_step(model), wanted)


def test_without_gradients_it_is_the_plain_call() -> None:
    model = Loop().eval()
    with torch.no_grad():
        wanted = model(batch())
        with assigned(model, Assignment({paths(model): SHARED})):
            assert torch.equal(model(batch()), wanted)


def test_parts_of_a_block_are_regions_and_go() -> None:
    torch.manual_seed(0)
    model = Loop()
    wanted = after_a_step(model)
    before = [sorted(module.__dict__) for module in model.modules()]
    plain = memopt.saved_bytes(model, batch())
    parts = Choice(parts=("norm", "drop"))
    inside = Choice(checkpoint=True, parts=("norm",))
    assert str(parts) == "checkpoint norm, drop"
    assert str(inside) == "checkpoint (norm inside)"
    for choice in (parts, inside):
        with assigned(model, Assignment(dict.fromkeys(paths(model), choice))):
            assert memopt.saved_bytes(model, batch()) < plain
            assert same_bits(after_a_step(model), wanted)
    assert [sorted(module.__dict__) for module in model.modules()] == before


def test_a_later_block_s_argument_must_not_be_written_before_backward() -> None:
    """As PyTorch says of what it saves; the message names the block."""

    class Scaled(Loop):
        def forward(self, x: Tensor) -> Tensor:
            x, self.scale = self.stem(x), torch.ones(1, WIDTH)
            for number, block in enumerate(self.blocks):
                x = block(x, self.scale)[0] if number else block(x)
            return x.square().mean()

    model = Scaled()
    with assigned(model, Assignment({paths(model): SHARED})):
        loss = model(batch())
        model.scale.mul_(2)
        with pytest.raises(RuntimeError, match=r"Scaled.blocks.1 .* must not be written"):
            loss.backward()
        assert all(parameter.grad is None for parameter in model.blocks[0].parameters())
        model(batch()).backward()
