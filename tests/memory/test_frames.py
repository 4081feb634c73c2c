"""Proves: looking at the frames of a forward keeps none of its locals alive, so that the ledger's
peak is the allocator's; the locals stay, and so does a dict that the forward has asked for.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memopt.memory.allocator import LiveBytes
from memopt.memory.ledger import Ledger
from memopt.memory.totals import highs_of


class Renames(nn.Module):
    """Binds one name to one tensor after another."""

    def __init__(self, seen: Callable[[Tensor], object] = lambda x: None) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + x
            self.seen(x)
            x = x * x
        return x.view(-1) + x.view(-1)


def test_a_tensor_whose_name_is_bound_to_another_is_gone() -> None:
    alive: list[weakref.ref[Tensor]] = []
    gone: list[bool] = []

    def see(x: Tensor) -> None:
        gone.extend(ref() is None for ref in alive)
        alive[:] = [weakref.ref(x)]

    ledger = Ledger(model := Renames(see))
    with ledger:
        model(torch.ones(4))
    assert gone == [True, True]


def test_the_peak_of_a_forward_is_the_allocator_s() -> None:
    model, x = Renames(), torch.ones(1000)
    ledger = Ledger(model)
    ledger.adopt("inputs", [("x", x)])
    with ledger:
        model(x)
    with LiveBytes() as live:
        model(x)
    assert max(highs_of(ledger)) == live.most + x.nbytes == 3 * x.nbytes


class Asks(nn.Module):
    def forward(self, x: Tensor, scale: float = 2.0) -> dict[str, Any]:
        there = locals()
        y = x * scale
        z = y + there["x"]
        assert there["scale"] == scale
        return {"z": z, "there": sorted(there)}


def test_a_dict_of_locals_that_a_forward_asked_for_stays() -> None:
    ledger = Ledger(model := Asks())
    with ledger:
        found = model(torch.ones(4))
    assert torch.equal(found["z"], torch.full((4,), 3.0))
    assert {"x", "scale", "self"} <= set(found["there"])


def test_locals_stay_under_a_tracer() -> None:
    """One writes the dict back into the frame, before Python 3.13."""
    ledger, model = Ledger(nn.Module()), Renames()

    def trace(*_: Any) -> Any:
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with ledger:
            found = model(torch.ones(4))
    finally:
        sys.settrace(before)
    assert torch.equal(found, model(torch.ones(4)))
