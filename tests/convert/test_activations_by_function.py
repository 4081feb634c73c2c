"""Proves: inside a converted model's call a module that computes an activation of PyTorch's calls
PyTorch's function, which is memopt's there, with the bits of memopt's op. A module whose number was
changed, and a module in a transform of torch.func, run its own forward.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import memopt
import memopt.functional as M
from memopt.functional.activation import FORMULAS

own_forwards: list[str] = []
"""The activations whose own forward ran, in the order of calls."""


class Tanh(nn.Module):
    """GELU's tanh form, written by hand, with a number that another value changes."""

    def __init__(self) -> None:
        super().__init__()
        self.cubed = 0.044715

    def forward(self, x: Tensor) -> Tensor:
        own_forwards.append("gelu_tanh")
        inner = math.sqrt(2 / math.pi) * (x + self.cubed * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class Erf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        own_forwards.append("gelu")
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        own_forwards.append("silu")
        return x * torch.sigmoid(x)


KINDS: dict[str, type[nn.Module]] = {"gelu_tanh": Tanh, "gelu": Erf, "silu": Swish}
X = torch.linspace(-6, 6, 48).view(6, 8)


def converted(kind: type[nn.Module]) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8), kind())
    report = memopt.convert(model)
    assert len(report.swapped) == 1
    nn.init.eye_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    own_forwards.clear()
    return model


@pytest.mark.parametrize("name", KINDS)
def test_bits_are_those_of_the_op(name: str) -> None:
    model = converted(KINDS[name])
    x, y = (X.clone().requires_grad_() for _ in range(2))
    actual, expected = model(x), M.activation(y, name)
    assert torch.equal(actual, expected)
    assert torch.equal(
        torch.autograd.grad(actual.sum(), x)[0], torch.autograd.grad(expected.sum(), y)[0]
    )
    assert not own_forwards


def test_a_module_whose_number_was_changed_runs_its_own_forward() -> None:
    model = converted(Tanh)
    model[1].cubed = 0.0
    expected = 0.5 * X * (1 + torch.tanh(math.sqrt(2 / math.pi) * X))
    torch.testing.assert_close(model(X), expected)
    assert own_forwards == ["gelu_tanh"]


class Slope(nn.Module):
    """The derivative of an activation, by a transform inside the model's call."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        slope: Tensor = torch.func.jvp(self.act, (x,), (torch.ones_like(x),))[1]
        return slope


@pytest.mark.parametrize("name", KINDS)
def test_a_transform_meets_the_module_s_own_forward(name: str) -> None:
    model = Slope(KINDS[name]())
    assert len(memopt.convert(model).swapped) == 1
    own_forwards.clear()
    exact = X.double().requires_grad_()
    (expected,) = torch.autograd.grad(FORMULAS[name](exact).sum(), exact)
    torch.testing.assert_close(model(X).double(), expected, rtol=1e-5, atol=1e-6)
    assert own_forwards == [name]
