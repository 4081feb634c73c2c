"""Proves: in a converted model activations that write over their input still do, as modules and as
functions; behind a norm they keep nothing, elsewhere one tensor of PyTorch's two; and where memopt
would keep no less, PyTorch's own run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt._convert.recipes import turn_recipes_off
from tests.convert.support import kept_bytes, memopt_ops, one_step

CHANNELS, WIDTH = 4, 6
ONE = 2 * CHANNELS * WIDTH * WIDTH * 4
STATISTICS = 2 * CHANNELS * WIDTH * 8
X = torch.randn(2, CHANNELS, WIDTH, WIDTH)

SAVES_CLONE: dict[str, Callable[[], nn.Module]] = {
    "SiLU": lambda: nn.SiLU(inplace=True),
    "ReLU6": lambda: nn.ReLU6(inplace=True),
    "Hardswish": lambda: nn.Hardswish(inplace=True),
    "Hardsigmoid": lambda: nn.Hardsigmoid(inplace=True),
    "Mish": lambda: nn.Mish(inplace=True),
}
SAVES_RESULT: dict[str, Callable[[], nn.Module]] = {
    "ReLU": lambda: nn.ReLU(inplace=True),
    "LeakyReLU": lambda: nn.LeakyReLU(0.2, inplace=True),
    "ELU": lambda: nn.ELU(inplace=True),
}
MODULES = {**SAVES_CLONE, **SAVES_RESULT}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.silu": lambda x: F.silu(x, inplace=True),
    "F.relu": lambda x: F.relu(x, inplace=True),
    "F.relu_": F.relu_,
    "relu_": lambda x: x.relu_(),
    "sigmoid_": lambda x: x.sigmoid_(),
    "torch.relu_": torch.relu_,
    "F.relu6": lambda x: F.relu6(x, inplace=True),
    "F.hardtanh_": lambda x: F.hardtanh_(x, 0, 6),
    "F.hardswish": lambda x: F.hardswish(x, inplace=True),
    "F.hardsigmoid": lambda x: F.hardsigmoid(x, inplace=True),
    "F.leaky_relu": lambda x: F.leaky_relu(x, 0.1, inplace=True),
    "F.leaky_relu_": F.leaky_relu_,
    "F.elu_": F.elu_,
    "F.mish": lambda x: F.mish(x, inplace=True),
}
# Behind a norm these are PyTorch's: memopt has another op, or none.
LEFT: dict[str, Callable[[Tensor], Tensor]] = {
    "another hardtanh": lambda x: F.hardtanh_(x, -1, 1),
    "a slope of 0": lambda x: F.leaky_relu(x, 0.0, inplace=True),
    "selu": lambda x: F.selu(x, inplace=True),
    "a view": lambda x: torch.cat((x[:1].relu_(), x[1:])),
}


class Calls(nn.Module):
    """A convolution, a norm, an activation, a convolution."""

    def __init__(self, activation: Callable[[Tensor], Tensor], norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.activation: Any = activation if isinstance(activation, nn.Module) else (activation,)
        self.second = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        activation = self.activation[0] if isinstance(self.activation, tuple) else self.activation
        h = self.norm(self.first(x))
        activated = activation(h)
        output: Tensor = self.second(activated) + h.mean()
        return output


def made(activation: Callable[[Tensor], Tensor], norm: bool, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = Calls(activation, norm)
    model = copy.deepcopy(plain)
    memopt.convert(model, **options)
    return model, plain


def assert_trains_alike(model: nn.Module, plain: nn.Module) -> None:
    ours = one_step(lambda: model(X), *model.parameters())
    for mine, theirs in zip(ours, one_step(lambda: plain(X), *plain.parameters()), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_a_module_behind_a_norm_keeps_nothing(make: Callable[[], nn.Module]) -> None:
    for options in ({}, {"functional": False}):
        model, plain = made(make(), norm=True, **options)
        assert kept_bytes(model, X) == ONE + STATISTICS
        assert kept_bytes(plain, X) >= 2 * ONE
        assert_trains_alike(model, plain)


@pytest.mark.parametrize("call", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function_behind_a_norm_keeps_nothing(call: Callable[[Tensor], Tensor]) -> None:
    model, plain = made(call, norm=True)
    assert kept_bytes(model, X) == ONE + STATISTICS
    assert_trains_alike(model, plain)


@pytest.mark.parametrize("make", SAVES_CLONE.values(), ids=SAVES_CLONE)
def test_behind_a_convolution_one_tensor_of_two_is_kept(make: Callable[[], nn.Module]) -> None:
    model, plain = made(make(), norm=False)
    assert (kept_bytes(plain, X), kept_bytes(model, X)) == (2 * ONE, ONE)
    assert_trains_alike(model, plain)


@pytest.mark.parametrize("make", SAVES_RESULT.values(), ids=SAVES_RESULT)
def test_behind_a_convolution_one_whose_result_is_enough_is_pytorch_s(
    make: Callable[[], nn.Module],
) -> None:
    model, plain = made(make(), norm=False)
    assert kept_bytes(plain, X) == kept_bytes(model, X) == ONE
    assert "memopt::_activation_forward_" not in memopt_ops(lambda: model(X))
    assert_trains_alike(model, plain)


@pytest.mark.parametrize("call", LEFT.values(), ids=LEFT)
def test_other_calls_are_pytorch_s(call: Callable[[Tensor], Tensor]) -> None:
    model, plain = made(call, norm=True)
    assert "memopt::_activation_forward_" not in memopt_ops(lambda: model(X))
    assert_trains_alike(model, plain)


@pytest.mark.parametrize("name", MODULES)
def test_the_report_says_that_it_is_in_place_and_what_that_needs(name: str) -> None:
    model = nn.Sequential(nn.LayerNorm(WIDTH), MODULES[name]())
    report = memopt.convert(model)
    assert [e.to for e in report.swapped][1:] == [f"memopt.nn.{name}(inplace=True)"]
    assert "nothing changed" in str(memopt.convert(model))
    memopt.revert(model)
    report = memopt.convert(model, recipes=False)
    assert [(e.path, e.reason) for e in report.left] == [
        ("1", "without recipes memopt's op keeps no less than PyTorch's, which is in place")
    ]


@pytest.mark.parametrize("name", MODULES)
def test_outside_of_the_model_and_without_gradients_it_writes_over_its_input(name: str) -> None:
    model = nn.Sequential(nn.LayerNorm(WIDTH), MODULES[name]())
    expected = MODULES[name]()(X.clone())
    memopt.convert(model)
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            x = X.clone()
            assert model[1](x) is x
            torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("name", ["SiLU", "ReLU"])
def test_under_autocast(name: str) -> None:
    model, plain = made(MODULES[name](), norm=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = one_step(lambda: model(X), *model.parameters())
        theirs = one_step(lambda: plain(X), *plain.parameters())
        assert kept_bytes(model, X) < kept_bytes(plain, X)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine.float(), other.float(), rtol=0.1, atol=0.1)


def test_a_training_loop_has_the_same_bits_with_recipes_and_without() -> None:
    def train(recipes: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(CHANNELS, 8, 3),
            nn.LayerNorm(WIDTH - 2),
            nn.SiLU(inplace=True),
            nn.Conv2d(8, 8, 1),
            nn.Hardswish(inplace=True),
            nn.Conv2d(8, 8, 1),
        )
        memopt.convert(model)
        if not recipes:  # the same ops, and everything kept
            for module in model.modules():
                turn_recipes_off(module)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    for ours, theirs in zip(train(True), train(False), strict=True):
        assert torch.equal(ours, theirs)
