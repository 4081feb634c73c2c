"""Proves: what modules keep of a step with its history, as a recurrent network keeps hidden states
which the training detaches between steps, does not stop what looks at several steps. A history
that backward left as it was stays.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.memory.step import Step

ROWS, WIDTH = 64, 16


class Recurrent(nn.Module):
    """Truncated backpropagation through time: whoever trains it calls `detach` before a step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.now, self.before = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(4)
        )
        self.kind = kind
        if kind == "buffer":
            self.register_buffer("state", torch.zeros(ROWS, WIDTH))
        else:
            self.state: Any = [torch.zeros(ROWS, WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        state = self.state if self.kind == "buffer" else self.state[0]
        h = torch.tanh(self.now(x) + self.before(state))
        if self.kind == "buffer":
            self.state = h
        else:
            self.state[0] = h
        for block in self.blocks:
            h = h + block(h)
        return h.square().mean()

    def detach(self) -> None:
        (self.state if self.kind == "buffer" else self.state[0]).detach_()


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("kind", ["buffer", "list"])
def test_steps_of_a_model_that_keeps_its_state(kind: str, has_run: bool) -> None:
    model, x = Recurrent(kind), torch.randn(ROWS, WIDTH)
    if has_run:
        model(x).backward()
    state = model.state if kind == "buffer" else model.state[0]
    history, values = state.grad_fn, state.clone()
    plan = memopt.plan(model, x, "1GiB", steps=1)
    plan = plan.within(plan.peak * 3 // 4)
    assert memopt.anatomy(model, x, measure=True).measured is not None
    assert memopt.fits(model, x, "1GiB").peak > 0
    assert memopt.check(model, x)
    plan.apply()
    after = model.state if kind == "buffer" else model.state[0]
    assert after is state
    assert after.grad_fn is history
    assert torch.equal(after, values)
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget
    for _ in range(2):
        model.detach()
        model(x).backward()
    plan.undo()


class Tied(nn.Module):
    """Makes its view of a weight when it is called first; backward goes through it each time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.view: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.view is None:
            self.view = self.embed.weight.t()
        return (x @ self.view).sum()


def test_a_history_that_backward_did_not_free_stays() -> None:
    model, x = Tied(), torch.randn(4, WIDTH)
    step = Step(model, x, None, who="test")
    for _ in range(3):
        step.forward_and_backward(x)
        assert model.embed.weight.grad is not None
        model.embed.weight.grad = None
