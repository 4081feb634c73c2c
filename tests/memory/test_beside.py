"""A step trains what its optimizer holds, whether the model has it or not: a criterion with weights
of its own, a learnt temperature, a second network in the same optimizer. Proved against the
allocator's own count: predicted and measured peaks of such steps are theirs, and nothing of what is
trained beside the model is changed by being counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.memory.allocator import LiveBytes

_SCALARS = 128
"""Bytes of the loss, its gradient and an optimizer's counts of steps, which are made and counted at
different instants."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(self.a(x))


class Criterion(nn.Module):
    """Trained weights, frozen ones and a buffer, each large beside the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 300)
        self.frozen = nn.Parameter(torch.ones(300, 20), requires_grad=False)
        self.register_buffer("centers", torch.ones(20_000))

    def forward(self, out: Tensor) -> Tensor:
        return (self.proj(out) @ self.frozen).square().mean() * self.centers[0]


Made = tuple[
    nn.Module, list[nn.Parameter], list[Tensor], dict[str, Any], Callable[[Tensor], Tensor]
]


def _loss_module(model: nn.Module) -> Made:
    criterion = Criterion()
    held = [*criterion.parameters(), *criterion.buffers()]
    return model, [*criterion.proj.parameters()], held, {"loss": criterion}, criterion


def _loss_that_closes_over(model: nn.Module) -> Made:
    model, trained, held, _, criterion = _loss_module(model)
    return model, trained, held, {"loss": lambda out: criterion(out)}, criterion


def _step_that_closes_over(model: nn.Module) -> Made:
    model, trained, held, _, criterion = _loss_module(model)

    def step(model: nn.Module, batch: Any) -> None:
        criterion(model(batch)).backward()

    return model, trained, held, {"step": step}, criterion


def _bare_parameter(model: nn.Module) -> Made:
    scale = nn.Parameter(torch.ones(64, 200))

    def loss(out: Tensor) -> Tensor:
        return (out @ scale).square().mean()

    return model, [scale], [scale], {"loss": loss}, loss


def _never_used(model: nn.Module) -> Made:
    other = nn.Parameter(torch.ones(64, 200))

    def loss(out: Tensor) -> Tensor:
        return out.square().mean()

    return model, [other], [other], {"loss": loss}, loss


def _tied_to_the_model(model: nn.Module) -> Made:
    criterion = Criterion()
    criterion.proj = model[0]  # type: ignore[index]
    criterion.frozen = nn.Parameter(torch.ones(64, 20), requires_grad=False)
    held = [criterion.frozen, criterion.centers]
    return model, [], held, {"loss": criterion}, criterion


_STEPS = (
    _loss_module,
    _loss_that_closes_over,
    _step_that_closes_over,
    _bare_parameter,
    _never_used,
    _tied_to_the_model,
)


def _made(make: Callable[[nn.Module], Made]) -> Made:
    torch.manual_seed(0)
    return make(nn.Sequential(nn.Linear(64, 64), Block(), Block(), Block()))


def _true_peak(
    model: nn.Module, batch: Tensor, optimizer: Any, held: list[Tensor], loss: Any
) -> int:
    def step() -> None:
        loss(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the optimizer's states
    states = [t for state in optimizer.state.values() for t in state.values()]
    with LiveBytes() as live:
        step()
    before = [batch, *model.parameters(), *held, *states]
    return live.most + sum(t.nbytes for t in before)


@pytest.mark.parametrize("make", _STEPS)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_what_is_trained_beside_the_model_counts(
    make: Callable[[nn.Module], Made], kind: type[torch.optim.Optimizer]
) -> None:
    model, trained, held, options, loss = _made(make)
    batch = torch.randn(32, 64)
    optimizer = kind([*model.parameters(), *trained])
    found = memopt.anatomy(model, batch, optimizer=optimizer, measure=True, **options)
    plan = memopt.plan(model, batch, optimizer=optimizer, budget="1GiB", **options)
    true = _true_peak(model, batch, optimizer, held, loss)
    assert found.predicted is not None
    assert found.measured is not None
    assert abs(found.predicted.peak.total - true) <= _SCALARS
    assert abs(found.measured.peak.total - true) <= _SCALARS
    assert plan.plain_peak == found.predicted.peak.total


def test_a_class_makes_an_optimizer_of_a_loss_modules_weights_too() -> None:
    model, trained, _, options, _ = _made(_loss_module)
    batch = torch.randn(32, 64)
    whole = torch.optim.AdamW([*model.parameters(), *trained])
    by_class = memopt.anatomy(model, batch, measure=False, **options)
    by_object = memopt.anatomy(model, batch, optimizer=whole, measure=False, **options)
    assert by_class.peak.total == by_object.peak.total
    assert memopt.largest_batch(model, batch, by_class.peak.total, **options) >= 32
    less = by_class.peak.total - 4 * sum(p.nbytes for p in trained)
    assert memopt.largest_batch(model, batch, less, **options) < 32


@pytest.mark.parametrize("make", _STEPS)
def test_nothing_beside_the_model_is_left_changed(make: Callable[[nn.Module], Made]) -> None:
    model, trained, held, options, loss = _made(make)
    batch = torch.randn(32, 64)
    optimizer = torch.optim.AdamW([*model.parameters(), *trained], lr=0.1)
    loss(model(batch)).backward()
    optimizer.step()
    tensors = [*model.parameters(), *held]
    tensors += [t for state in optimizer.state.values() for t in state.values()]
    before = [(t, t.detach().clone(), t._version, t.grad) for t in tensors]
    values = [None if grad is None else grad.clone() for *_, grad in before]
    memopt.anatomy(model, batch, optimizer=optimizer, measure=True, **options)
    memopt.plan(model, batch, optimizer=optimizer, budget="1GiB", **options)
    for (tensor, was, version, grad), value in zip(before, values, strict=True):
        assert torch.equal(tensor, was)
        assert tensor._version == version
        assert tensor.grad is grad
        assert grad is None or (value is not None and torch.equal(grad, value))
