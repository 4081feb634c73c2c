"""Proves: what runs for a measurement, a sample, a prediction or a plan ends where tensors have a
history from before (a batch that an encoder made, a transposed weight that a loss or a step holds):
the graph behind them is whole afterwards, with no gradient of its leaves, and forward writes
nothing into it, by an operator in place or by a hook. A buffer that forward writes gets none.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.memory.unchanged import unchanged

WIDTH = 8
ROOM = 1 << 30
Loss = Callable[[Tensor], Tensor]
Run = Callable[[nn.Module, Tensor, Loss], object]


def saves(model: nn.Module, x: Tensor, loss: Loss) -> None:
    memopt.saved_bytes(lambda: loss(model(x)))


def converts(model: nn.Module, x: Tensor, loss: Loss) -> None:
    memopt.convert(model, x)
    memopt.revert(model)
    memopt.convert(model, x, checkpoint=True)
    memopt.revert(model)


def checks(model: nn.Module, x: Tensor, loss: Loss) -> None:
    memopt.check(model, x, loss=loss)


def predicts(model: nn.Module, x: Tensor, loss: Loss) -> None:
    memopt.anatomy(model, x, loss=loss, measure=False)


def measures(model: nn.Module, x: Tensor, loss: Loss) -> None:
    memopt.anatomy(model, x, loss=loss, measure=True)


def plans(model: nn.Module, x: Tensor, loss: Loss) -> None:
    memopt.plan(model, x, loss=loss, steps=1)
    memopt.plan(model, x, loss=loss, measure=False).apply().undo()


def searches(model: nn.Module, x: Tensor, loss: Loss) -> None:
    memopt.largest_batch(model, x, ROOM, loss=loss, limit=2)
    memopt.fits(model, x, ROOM, loss=loss)


def steps(model: nn.Module, x: Tensor, loss: Loss) -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        loss(model(x)).backward()

    memopt.anatomy(model, x, step=step, measure=False)
    memopt.plan(model, x, step=step, steps=1)


RUNS: tuple[Run, ...] = (saves, converts, checks, predicts, measures, plans, searches, steps)
by_name = functools.partial(pytest.mark.parametrize, ids=lambda one: one.__name__)


def nothing(x: Tensor) -> None: ...


def in_place(x: Tensor) -> None:
    x.mul_(3)


def hooks(x: Tensor) -> None:
    if x.requires_grad:
        x.register_hook(lambda gradient: 0.5 * gradient)


def retains(x: Tensor) -> None:
    if x.requires_grad:
        x.retain_grad()


class Model(nn.Module):
    def __init__(self, habit: Callable[[Tensor], None] = nothing) -> None:
        super().__init__()
        parts = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        self.blocks, self.habit = nn.ModuleList(parts), habit

    def forward(self, x: Tensor) -> Tensor:
        self.habit(x)
        for block in self.blocks:
            x = block(x)
        return x


def squares(output: Tensor) -> Tensor:
    return output.square().mean()


def weighted(output: Tensor, weight: Tensor) -> Tensor:
    return (output @ weight).square().mean()


class Weighted(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, output: Tensor) -> Tensor:
        return weighted(output, self.weight)


class Object:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def loss(self, output: Tensor) -> Tensor:
        return weighted(output, self.weight)


def closure(weight: Tensor) -> Loss:
    return lambda output: weighted(output, weight)


def default(weight: Tensor) -> Loss:
    return lambda output, weight=weight: weighted(output, weight)


def part(weight: Tensor) -> Loss:
    return functools.partial(weighted, weight=weight)


def module(weight: Tensor) -> Loss:
    return Weighted(weight)


def method(weight: Tensor) -> Loss:
    return Object(weight).loss


@by_name("run", RUNS)
@by_name("holder", (closure, default, part, module, method))
def test_a_weight_behind_what_a_loss_holds_gets_no_gradient(
    run: Run, holder: Callable[[Tensor], Loss]
) -> None:
    """The transposed weight's history saves nothing; that of a scaled one saves the factor."""
    weight, factor = nn.Parameter(torch.randn(3, WIDTH)), nn.Parameter(torch.ones(()))
    for held in (weight.t(), (weight * factor).t()):
        history = held.grad_fn
        run(Model(), torch.ones(4, WIDTH), holder(held))
        assert weight.grad is None
        assert factor.grad is None
        assert held.grad_fn is history
        held.sum().backward()
        assert torch.equal(weight.grad, torch.ones(3, WIDTH))  # type: ignore[arg-type]
        weight.grad = factor.grad = None


@by_name("run", RUNS)
@by_name("habit", (nothing, in_place, hooks, retains))
def test_the_network_that_made_a_batch_trains_on(run: Run, habit: Callable[[Tensor], None]) -> None:
    torch.manual_seed(0)
    encoder, model = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)), Model(habit)
    x = encoder(torch.ones(4, WIDTH))
    before, history, version = x.detach().clone(), x.grad_fn, x._version
    run(model, x, squares)
    assert torch.equal(x, before)
    assert x._version == version
    assert x.grad_fn is history
    assert not x._backward_hooks
    assert not x.retains_grad
    assert encoder[1].weight.grad is None
    squares(model(x)).backward()
    found = encoder[1].weight.grad
    encoder.zero_grad()
    squares(model(encoder(torch.ones(4, WIDTH)))).backward()
    torch.testing.assert_close(found, encoder[1].weight.grad)


def test_hooks_of_a_batch_from_before_run_in_its_own_backward_alone() -> None:
    seen: list[int] = []
    x = nn.Linear(WIDTH, WIDTH)(torch.ones(4, WIDTH))
    x.register_hook(lambda gradient: seen.append(1))
    memopt.check(Model(), x, loss=squares)
    assert seen == []
    x.sum().backward()
    assert seen == [1]


def test_a_history_from_inputs_of_the_same_batch_is_differentiated() -> None:
    """Forces are gradients of an energy of distances, which the batch has beside positions."""

    def forces(places: Tensor, distances: Tensor) -> Tensor:
        return torch.autograd.grad(distances.pow(3).sum(), places, create_graph=True)[0]

    places = torch.randn(4, 3, requires_grad=True)
    assert memopt.saved_bytes(forces, places, places.square().sum(-1)) > 0
    assert places.grad is None


def test_bytes_are_counted_of_what_differentiates_a_graph_from_before() -> None:
    model = Model()
    loss = squares(model(torch.ones(4, WIDTH)))
    weights = [*model.parameters()]
    assert memopt.saved_bytes(lambda: torch.autograd.grad(loss, weights, create_graph=True)) > 0


def test_views_of_weights_do_not_count_as_saved() -> None:
    weight, x = nn.Parameter(torch.randn(3, WIDTH)), torch.ones(4, WIDTH)
    held = weight.t()
    assert memopt.saved_bytes(lambda: x @ held) == memopt.saved_bytes(lambda: x @ weight.t())


def test_sizes_are_searched_with_inputs_that_have_a_gradient() -> None:
    def forces(output: Tensor) -> Tensor:
        return torch.autograd.grad(output.sum(), inputs[-1], create_graph=True)[0].square().sum()

    inputs: list[Tensor] = []
    model, x = Model(inputs.append), torch.ones(4, WIDTH, requires_grad=True)
    assert memopt.largest_batch(model, x, ROOM, loss=forces, limit=2) == 2


class Memory(Model):
    """Writes features with their gradient into a buffer, once or in every step."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again
        self.register_buffer("memory", torch.zeros(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.again:
            self.memory.detach_()
        if self.memory.is_leaf:
            self.memory.copy_(x)
        return x


@by_name("run", (saves, converts, checks, predicts, measures, plans, steps))
@pytest.mark.parametrize("again", [False, True])
def test_a_buffer_that_forward_writes_has_no_history(run: Run, again: bool) -> None:
    """Nor does PyTorch warn that the gradient is read of what is no leaf."""
    model, x = Memory(again), torch.ones(4, WIDTH)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The .grad attribute of a Tensor that is not a")
        run(model, x, squares)
    assert model.memory.is_leaf
    assert not model.memory.requires_grad
    assert torch.equal(model.memory, torch.zeros(4, WIDTH))
    copy.deepcopy(model)
    squares(model(x)).backward()


def test_a_view_that_forward_writes_has_no_history() -> None:
    memory: Any = torch.zeros(2, WIDTH)
    rows, x = memory[0], torch.ones(WIDTH, requires_grad=True)
    with unchanged(memory, rows):
        rows.copy_(x)
    for tensor in (memory, rows):
        assert not tensor.requires_grad
        assert tensor.grad_fn is None
        assert torch.equal(tensor, torch.zeros_like(tensor))
    rows.copy_(x)
    assert memory.requires_grad
