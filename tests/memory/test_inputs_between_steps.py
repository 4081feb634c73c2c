"""Proves: a step that writes into its batch's dicts, lists and objects, as models do that hand one
from block to block, can be looked at several times: each look has the batch as it was given, as a
training has one of its own in each step. Predicted bytes are the allocator's; the batch stays.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.memory.allocator import LiveBytes

WIDTH = 16


@dataclasses.dataclass
class Sample:
    x: Tensor
    seen: list[Tensor]


class Writes(nn.Module):
    """What is computed takes the place of what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(4)
        )

    def forward(self, sample: Any) -> Tensor:
        held = sample if isinstance(sample, dict) else vars(sample)
        for block in self.blocks:
            held["x"] = held["x"] + block(held["x"])
            held["seen"].append(held["x"])
        return torch.stack(held["seen"]).square().mean()


MADE: dict[str, Callable[..., Any]] = {
    "dict": lambda x, seen: {"x": x, "seen": seen},
    "dataclass": Sample,
    "object": lambda x, seen: SimpleNamespace(x=x, seen=seen),
}
WAYS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "anatomy": lambda model, batch: memopt.anatomy(model, batch),
    "plan": lambda model, batch: memopt.plan(model, batch, "1GB", measure=False),
    "measured plan": lambda model, batch: memopt.plan(model, batch, "1GB", measure=True).apply(),
    "check": memopt.check,
    "regions": lambda model, batch: memopt.apply_activation_checkpointing(model, batch=batch),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MADE)
def test_steps_that_write_into_their_batch(kind: str, way: str) -> None:
    x, seen = torch.randn(8, 32, WIDTH), list[Tensor]()
    sample = MADE[kind](x, seen)
    held = sample if isinstance(sample, dict) else vars(sample)
    WAYS[way](Writes(), (sample,))
    assert held["x"] is x
    assert held["seen"] is seen
    assert not seen


def test_predicted_bytes_are_the_allocators() -> None:
    """A list that grew from look to look would count several steps' activations."""
    model, x = Writes(), torch.randn(8, 32, WIDTH)
    sample = Sample(x, [])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = memopt.plan(model, (sample,), "1GB", optimizer=optimizer, measure=False)
    before = sum(t.nbytes for t in (*model.parameters(), x))
    for _ in range(2):  # in the first one libraries make what they keep
        model.zero_grad()
        mine = copy.deepcopy(sample)
        with LiveBytes() as live:
            model(mine).backward()
    assert plan.plain_peak == live.most + before
