"""Proves: where tensors go that are made without a device is the user's affair. memopt's answers
are the same, and random numbers and the setting stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt

WIDTH = 32


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(
                *(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU()),
                *(nn.Dropout(0.1), nn.Linear(64, WIDTH)),
            )
            for _ in range(3)
        )
    )


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def planned(net: nn.Module, x: Tensor) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    plan = memopt.plan(net, x, loss=loss, optimizer=optimizer, measure=False)
    plan = plan.within(plan.peak * 8 // 10).apply()
    choices = dict(plan.assignment.choices)
    plan.undo()
    return plan.peak, plan.measured_peak, choices


CALLS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "plan": planned,
    "fit": lambda net, x: (
        memopt.fit(net, x, "1MB", loss=loss, optimizer=torch.optim.SGD, steps=1).micro_batch
    ),
    "regions": lambda net, x: memopt.apply_activation_checkpointing(net),
    "convert": lambda net, x: len(memopt.convert(net, x, checkpoint=True, chunks=2).swapped),
    "largest_batch": lambda net, x: memopt.largest_batch(net, x, "1MB", loss=loss),
    "anatomy": lambda net, x: memopt.anatomy(net, x, loss=loss, measure=True).predicted.peak.total,
}


@pytest.mark.parametrize("name", CALLS)
def test_answers_do_not_depend_on_where_tensors_are_made(name: str) -> None:
    x = torch.randn(512, WIDTH)
    wanted, net = CALLS[name](model(), x), model()
    state = torch.get_rng_state()
    torch.set_default_device("meta")
    try:
        assert CALLS[name](net, x) == wanted
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)
    assert torch.equal(torch.get_rng_state(), state)
