"""Proves: autograd Functions written in Python work in regions: they may save their output and be
the last in a region, whose recompute stops inside them, read what they saved twice, and get the
very object that they saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from memopt._checkpoint import checkpoint
from tests.checkpoint.support import (
    collector_disabled,
    every_way,
    live_tensors_and_regions,
    plain,
    step_results,
)
from tests.support.bits import assert_same_bits


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, requires_grad=True)


class Exp(torch.autograd.Function):
    """Saves its output, and reads what it saved twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,), (again,) = ctx.saved_tensors, ctx.saved_tensors
        assert torch.equal(y, again)
        return grad * y


class PassOn(torch.autograd.Function):
    """Saves its second argument, and hands what backward gets for it to `seen`."""

    seen: list[Tensor]

    @staticmethod
    def forward(ctx: Any, x: Tensor, constant: Tensor) -> Tensor:
        ctx.save_for_backward(constant)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        PassOn.seen.extend(ctx.saved_tensors)
        return grad, None


def test_function_that_reads_its_saved_output_twice_at_the_end_of_a_region(x: Tensor) -> None:
    """PyTorch's checkpoint refuses the second look; the plain run allows it."""
    for surroundings in (lambda f, x: f(x.sin()), lambda f, x: f(x).sin()):
        results = [
            step_results(lambda way=way, s=surroundings: way(lambda x: s(Exp.apply, x), x), [x])
            for way in (plain, checkpoint)
        ]
        assert_same_bits(results[1], results[0])


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
def test_a_thousand_functions_that_save_their_output_last_leave_nothing(nested: bool) -> None:
    """The recompute stops in the middle of saving: what the Function has saved by then must go."""
    x = torch.randn(16, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        y = Exp.apply(x.sin())
        return checkpoint(Exp.apply, y) if nested else y

    def step() -> None:
        checkpoint(region, x).sum().backward()
        x.grad = None

    step()
    with collector_disabled():
        before = live_tensors_and_regions()
        for _ in range(1000):
            step()
        assert live_tensors_and_regions() == before


@every_way
def test_saved_constants_are_the_very_objects(way: Callable[..., Any], x: Tensor) -> None:
    constant, PassOn.seen = torch.ones(4), []
    way(PassOn.apply, x, constant).sum().backward()
    assert [saved is constant for saved in PassOn.seen] == [True]
