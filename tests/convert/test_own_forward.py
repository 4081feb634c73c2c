"""Proves: where PyTorch's functions are memopt's anyway, a swapped module of torch.nn runs its own
forward, which calls the function; everywhere else memopt.nn's. Bits, bytes and recipes of both ways
are the same. The second way is forced by `functional=False`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._class_patch import SwappedModule
from memopt._convert.functions import functions_paused
from memopt._extension import _C
from tests.convert.test_entry_points import WIDTH

MODULES = {
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "LayerNorm without bias": lambda: nn.LayerNorm(WIDTH, bias=False),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "GELU": nn.GELU,
    "GELU, tanh": lambda: nn.GELU("tanh"),
    "SiLU": nn.SiLU,
    "ReLU": nn.ReLU,
    "Sigmoid": nn.Sigmoid,
    "Dropout": lambda: nn.Dropout(0.3),
    "Dropout of nothing": lambda: nn.Dropout(0.0),
}


class Around(nn.Module):
    """Calls a module between linears."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.first, self.module, self.last = (
            nn.Linear(WIDTH, WIDTH),
            module,
            nn.Linear(WIDTH, WIDTH),
        )
        self.takes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.takes.append(_C.functions_take(x))
        y: Tensor = self.last(self.module(self.first(x)))
        return y


def around(name: str) -> Around:
    torch.manual_seed(0)
    return Around(MODULES[name]())


def input() -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


def results(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(2)
    x = input().requires_grad_()
    y = model(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


@pytest.mark.parametrize("name", MODULES)
def test_both_ways_are_the_same(name: str) -> None:
    quick, slow = around(name), around(name)
    memopt.convert(quick)
    memopt.convert(slow, functional=False)
    assert isinstance(quick.module, SwappedModule)
    for a, b in zip(results(quick), results(slow), strict=True):
        assert torch.equal(a, b)
    assert (quick.takes, slow.takes) == ([True], [False])
    assert memopt.saved_bytes(quick, input()) == memopt.saved_bytes(slow, input())


def test_calls_under_autocast_outside_the_model_and_paused_run_memopts_own() -> None:
    model = around("LayerNorm")
    memopt.convert(model)
    assert not _C.functions_take(input())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(input())
        expected = memopt.nn.LayerNorm.forward(model.module, model.first(input()))  # type: ignore[arg-type]
        assert model.module(model.first(input())).dtype == expected.dtype
    with functions_paused():
        model(input())
    with memopt.recipes():
        assert not _C.functions_take(input())
    model(input())
    assert model.takes == [False, False, True]
    assert y.dtype == torch.bfloat16
    assert not _C.functions_take("no tensor")


def test_a_hook_and_a_forward_of_the_users_own_run() -> None:
    model = around("GELU")
    memopt.convert(model)
    seen: list[Tensor] = []
    model.module.register_forward_hook(lambda module, args, output: seen.append(output))
    y = model(input())
    assert len(seen) == 1
    assert torch.equal(model.last(seen[0]), y)
