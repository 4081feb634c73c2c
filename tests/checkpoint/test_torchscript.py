"""Proves: what TorchScript runs is seen by no hook and is no block, and the modules around it are
planned and run as regions as others are; what can be no region is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt

WIDTH = 8

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)))


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), scripted()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(self.norm(x))
        return y


class Model(nn.Module):
    def __init__(self, *first: nn.Module) -> None:
        super().__init__()
        self.first = nn.ModuleList(first)
        self.blocks = nn.ModuleList(Around() for _ in "abc")

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.first, *self.blocks):
            x = block(x)
        return x.square().mean()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("batch", [False, True])
def test_regions_around_it(batch: bool) -> None:
    """What ends a recompute early does not pass through TorchScript."""
    model, x = Model(scripted(), scripted()), torch.randn(16, WIDTH)
    expected, kept = gradients(model, x), memopt.saved_bytes(model, x)
    chosen = memopt.apply_activation_checkpointing(model, batch=x if batch else None)
    assert chosen == ["blocks.0", "blocks.1", "blocks.2"]
    assert memopt.saved_bytes(model, x) < kept
    found = gradients(model, x)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_a_plan_around_it() -> None:
    model, x = Model(scripted()), torch.randn(64, WIDTH)
    with pytest.raises(memopt.BudgetTooSmall) as error:
        memopt.plan(model, x, 100, measure=False, chunks=False)
    floor = error.value.floor
    plan = memopt.plan(model, x, floor, measure=False, chunks=False)
    plan.apply()
    assert plan.measured_peak is not None
    assert plan.measured_peak <= floor < plan.plain_peak
    assert len(gradients(model, x)) == len(list(model.parameters()))


REFUSALS: list[Callable[[Any, Tensor], object]] = [
    lambda model, x: memopt.plan(model, x, "1GiB", measure=False),
    lambda model, x: memopt.apply_activation_checkpointing(model),
    lambda model, x: memopt.apply_activation_checkpointing(model, batch=x),
    lambda model, x: memopt.apply_activation_checkpointing(
        nn.Sequential(model), check_fn=lambda module: module is model
    ),
]


@pytest.mark.parametrize("call", REFUSALS)
def test_it_is_refused_by_name(call: Callable[[Any, Tensor], object]) -> None:
    with pytest.raises(TypeError, match="must not be a ScriptModule"):
        call(scripted(), torch.randn(4, WIDTH))


@torch.jit.script
def snake(x: Tensor, alpha: Tensor) -> Tensor:
    return x + (alpha + 1e-9).reciprocal() * torch.sin(alpha * x).pow(2)


class Snake(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = snake(x, self.alpha)
        return y


@pytest.mark.parametrize("way", ["batch", "region", "wrapper"])
def test_a_recompute_ends_inside_a_scripted_function(way: str) -> None:
    """The interpreter raised an error of its own in the place of what ends the recompute."""
    model = nn.Sequential(Snake(), nn.Conv1d(WIDTH, WIDTH, 1), Snake())
    x = torch.randn(2, WIDTH, 16, requires_grad=True)
    expected = [gradients_of_sum(model, x) for _ in range(4)]
    if way == "batch":
        assert memopt.apply_activation_checkpointing(model, batch=x)
    for block in (model[0], model[2]):
        if way == "wrapper":
            memopt.checkpoint_wrapper(block)
        if way == "region":
            block.forward = partial(memopt.checkpoint, block.forward)
    for wanted in expected:
        assert all(map(torch.allclose, gradients_of_sum(model, x), wanted))


def gradients_of_sum(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]))


def test_an_error_inside_a_scripted_function_of_a_recompute() -> None:
    """Nothing has been saved yet where it raises: it is the user's own."""
    calls: list[int] = []

    def run(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            x = x[:, :1]
        return added(x.sin(), torch.ones(2, 4)).cos()

    x = torch.randn(2, 4, requires_grad=True)
    y = memopt.checkpoint(run, x, determinism_check="none")
    with pytest.raises(RuntimeError, match="TorchScript interpreter"):
        y.sum().backward()


@torch.jit.script
def added(x: Tensor, y: Tensor) -> Tensor:
    return torch.mm(x, y.t()) @ x.new_ones([2, 2])
