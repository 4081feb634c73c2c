"""Proves: a step that is a function of the user's has the whole batch's gradients in micro-batches:
every backward that it runs counts with the micro-batch's share.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memopt

ROWS, WIDTH = 10, 8
Function = Callable[[Any, Any], None]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)).double()


def two() -> nn.Module:
    return nn.ModuleList([net(), net()])


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64)


def two_backwards(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()
    torch.autograd.backward([model(2 * x).mean(), model(3 * x).tanh().mean()])


def gradient_penalty(model: nn.Module, x: Tensor) -> None:
    """Its own gradients are a part of forward: the share counts once, behind the norm."""
    x = x.detach().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.mean() + (grad.norm(dim=1) - 1).square().mean()).backward()


def gan(models: nn.ModuleList, noise: Tensor) -> None:
    generator, critic = models
    fake = generator(noise)
    (F.softplus(-critic(noise)) + F.softplus(critic(fake.detach()))).mean().backward()
    F.softplus(-critic(fake)).mean().backward()


def reentrant(model: nn.Module, x: Tensor) -> None:
    """Its checkpoint runs backward inside of backward, whose gradients have the share already."""
    checkpoint(model, x.requires_grad_(), use_reentrant=True).square().mean().backward()


def given_gradient(model: nn.Module, x: Tensor) -> None:
    """Of a sum over rows, divided by hand."""
    out = model(x)
    out.backward(torch.ones_like(out) / out.numel())


STEPS: dict[str, tuple[Callable[[], nn.Module], Function]] = {
    "two backwards": (net, two_backwards),
    "a gradient penalty": (net, gradient_penalty),
    "a GAN": (two, gan),
    "a reentrant checkpoint": (net, reentrant),
    "a gradient that is given": (net, given_gradient),
}


def assert_close(model: nn.Module, reference: nn.Module) -> None:
    """float64, and sums in another order: a few units in the last place of the largest entry."""
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        limit = 64 * torch.finfo(p.dtype).eps * q.grad.abs().max()
        assert (p.grad - q.grad).abs().max() <= limit


@pytest.mark.parametrize("micro_batch", [1, 3, 10])
@pytest.mark.parametrize("name", STEPS)
def test_gradients_are_the_whole_batchs(name: str, micro_batch: int) -> None:
    make, step = STEPS[name]
    model, x = make(), batch()
    whole = copy.deepcopy(model)
    step(whole, x.clone())
    result = memopt.accumulate(model, x, micro_batch=micro_batch, step=step)
    assert result.micro_batches == -(-ROWS // micro_batch)
    assert_close(model, whole)


def test_the_loss_is_the_sum_of_all() -> None:
    model, x = net(), batch()
    with torch.no_grad():
        wanted = model(x).square().mean() + model(2 * x).mean() + model(3 * x).tanh().mean()
    found = memopt.accumulate(model, x, micro_batch=4, step=two_backwards).loss
    assert float(found) == pytest.approx(float(wanted))


def test_within_a_budget_rows_are_predicted_and_kept() -> None:
    model, x = two(), batch()
    peak = memopt.plan(model, x, 1 << 30, step=gan, measure=False, optimizer=None).plain_peak
    assert memopt.accumulate(model, x, budget=peak, step=gan).micro_batch == ROWS
    model.zero_grad()
    result = memopt.accumulate(model, x, budget=peak - 64, step=gan)
    assert 1 <= result.micro_batch < ROWS


def test_a_plan_and_micro_batches_of_a_function() -> None:
    model, x = nn.ModuleList([nn.Sequential(*(net() for _ in range(4))), net()]), batch()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    whole = copy.deepcopy(model)
    gan(whole, x)
    fitted = memopt.fit(model, x, "1MB", optimizer=optimizer, step=gan, steps=1)
    fitted(x)
    fitted.undo()
    assert_close(model, whole)


@pytest.mark.parametrize(
    ("step", "options", "said"),
    [
        (lambda model, x: None, {}, "accumulate: step must run backward"),
        (two_backwards, {"loss": torch.mean}, "accumulate: loss must not be given with step"),
        (two_backwards, {"scaler": object()}, "accumulate: scaler must not be given with step"),
        (
            lambda model, x: model(x).mean().backward(create_graph=True),
            {},
            r"accumulate: step must ask torch.autograd.grad .* got backward\(create_graph=True\)",
        ),
    ],
    ids=["no backward", "a loss too", "a scaler", "a graph of gradients"],
)
def test_bad_steps_are_named(step: Any, options: dict[str, Any], said: str) -> None:
    model = net()
    with pytest.raises(ValueError, match=said):
        memopt.accumulate(model, batch(), micro_batch=2, step=step, **options)
    assert all(p.grad is None for p in model.parameters())
    assert torch.autograd._engine_run_backward.__name__ == "_engine_run_backward"
