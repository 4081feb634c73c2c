"""Proves: a region inside a converted model runs the same twice, in whichever thread backward runs:
memopt's and both of PyTorch's, around modules, methods and, for memopt's, functions.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

import memopt
from tests.convert.support import one_step
from tests.convert.test_entry_points import WIDTH, Methods, mlp, saved


class InRegions(nn.Module):
    """Modules and methods in regions, and functions if `functions`."""

    def __init__(self, region: Callable[..., Any], functions: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = Methods(), mlp(), nn.Linear(WIDTH, WIDTH)
        self.drop, self.early = nn.Dropout(0.5), nn.Dropout(0.25)
        self.region, self.functions = region, functions

    def forward(self, x: Tensor) -> Tensor:
        x = self.region(self.first, x)
        x = self.region(self.step, x)
        if self.functions:
            x = self.region(lambda x: F.gelu(self.third(x)), x)
            x = self.region(lambda x: F.dropout(self.third(F.relu(x)), 0.5), x)
        return self.region(self.second.forward, x)

    def step(self, x: Tensor) -> Tensor:
        x = self.second(self.early(x))
        if self.functions:
            x = F.dropout(F.sigmoid(x.relu()), 0.25)
        output: Tensor = self.drop(x)
        return output


def reentrant(fn: Callable[..., Any], x: Tensor) -> Any:
    return torch_checkpoint.checkpoint(fn, x, use_reentrant=True)


def non_reentrant(fn: Callable[..., Any], x: Tensor) -> Any:
    return torch_checkpoint.checkpoint(fn, x, use_reentrant=False)


def in_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("entry", ["model", "method", "leaf scope"])
@pytest.mark.parametrize("region", [memopt.checkpoint, non_reentrant, reentrant])
@pytest.mark.parametrize("run_backward", [lambda work: work(), in_a_thread])
def test_regions_inside_do_the_same_twice(
    region: Callable[..., Any],
    entry: str,
    functional: bool,
    run_backward: Callable[[Callable[[], None]], None],
) -> None:
    """In backward too, and wherever it runs: equal in every bit to the run without regions.

    But for PyTorch's reentrant kind: its forward saves nothing, so that sigmoid, which is memopt's
    where its input is kept anyway, rounds as PyTorch's there.
    """
    torch.manual_seed(0)
    model = InRegions(lambda fn, x: fn(x), functions=region is memopt.checkpoint)
    memopt.convert(model, functional=functional)
    enter = {
        "model": model,
        "method": model.step,
        "leaf scope": lambda x: model.region(model.second, x),
    }[entry]
    x = torch.randn(8, WIDTH, requires_grad=True)
    tensors = (x, *model.parameters())

    def run() -> list[Tensor | None]:
        torch.manual_seed(3)
        loss = enter(x).square().sum()
        gradients: list[Tensor | None] = []

        def backward() -> None:
            loss.backward()
            gradients.extend(t.grad for t in tensors)

        run_backward(backward)
        for tensor in tensors:
            tensor.grad = None
        assert gradients
        return [loss.detach(), *gradients]

    expected = run()
    model.region = region
    for mine, theirs in zip(run(), expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and region is reentrant:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
        else:
            assert mine is None or torch.equal(mine, theirs)


class Dropping(nn.Module):
    """A function of its own with a dropout, in a region."""

    def __init__(self, region: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.region = mlp(), region

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.region(lambda x: F.dropout(x, 0.5) * 3, x)
        return output


@pytest.mark.parametrize("region", [memopt.checkpoint, non_reentrant, reentrant])
@pytest.mark.parametrize("run_backward", [lambda work: work(), in_a_thread])
def test_the_recompute_draws_the_mask_of_forward(
    region: Callable[..., Any], run_backward: Callable[[Callable[[], None]], None]
) -> None:
    model = Dropping(region)
    memopt.convert(model)
    x = torch.randn(8, WIDTH, requires_grad=True)
    y = model(x)
    run_backward(lambda: y.sum().backward())
    torch.testing.assert_close(x.grad * x, y)


def test_a_wrapped_block_has_recipes_in_its_region() -> None:
    """A block that convert makes a region, entered through the model and alone."""
    plain = nn.Sequential(Methods(), Methods())
    model = copy.deepcopy(plain)
    memopt.convert(model, checkpoint=Methods)
    x = torch.randn(8, WIDTH, requires_grad=True)
    for enter in (lambda m: m(x), lambda m: m[0](x)):
        assert saved(lambda: enter(model)) <= 2 * x.numel() * 4  # noqa: B023
        for mine, theirs in zip(
            one_step(lambda: enter(model), x),  # noqa: B023
            one_step(lambda: enter(plain), x),  # noqa: B023
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
