"""Proves: what Python cannot copy (locks, modules of Python, files, generators) keeps no step from
being predicted, planned or measured: copies of a model share it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.memory.copies import copied

WIDTH = 8


class Refuses:
    def __reduce__(self) -> str:
        raise TypeError("no copies for a test")


def numbers() -> Iterator[int]:
    yield from range(3)


class Holds(nn.Module):
    def __init__(self, held: object) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in "ab")
        self.held = {"deep": [held]}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.sum()


UNCOPIED: list[Callable[[], Any]] = [
    threading.Lock,
    threading.local,
    threading.Event,
    lambda: math,
    numbers,
    lambda: open("/dev/null"),  # noqa: SIM115
    Refuses,
    lambda: torch.ones(2, requires_grad=True).sum().grad_fn,
]


@pytest.mark.parametrize("make", UNCOPIED)
def test_a_step_of_a_model_that_holds_it(make: Callable[[], Any]) -> None:
    held = make()
    model, x = Holds(held), torch.ones(4, WIDTH)
    found, plain = memopt.anatomy(model, x, measure=True), memopt.anatomy(Holds(None), x)
    assert found.measured is not None
    assert plain.predicted is not None
    assert found.measured.peak == plain.predicted.peak
    memopt.plan(model, x, "1GiB", measure=False).apply()
    assert model.held["deep"] == [held]


def test_all_else_is_copied() -> None:
    lock, other = threading.Lock(), threading.Lock()
    value = {"one": [lock, [1], lock], "other": (other, [2])}
    copy, pairs = copied(value, {})
    assert copy == value
    assert copy["one"] is not value["one"]
    assert copy["one"][1] is not value["one"][1]
    assert any(one is value["one"] and other is copy["one"] for one, other in pairs)


class Once(nn.Linear):
    def __deepcopy__(self, memo: object) -> Once:
        raise TypeError("no copies for a test")


def test_a_module_that_refuses_is_not_shared() -> None:
    """The copy would train the user's parameters."""
    with pytest.raises(TypeError, match="no copies for a test"):
        memopt.anatomy(nn.Sequential(Once(WIDTH, 1)), torch.ones(1, WIDTH))


class Packed(nn.Parameter):
    """A weight that is stored as bytes, as quantized ones are; its attributes say how."""

    form: dict[str, Any]


class OfBytes(nn.Module):
    """Unpacks its weight, and packs it in another order in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.weight = Packed(torch.zeros(WIDTH * WIDTH, dtype=torch.uint8), requires_grad=False)
        self.weight.form = {"shape": (WIDTH, WIDTH), "scale": torch.ones(1), "turned": False}

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.weight) is Packed
        form = self.weight.form
        if not self.training and not form["turned"]:
            self.weight.data = self.weight.data.reshape(form["shape"]).T.reshape(-1)
            form["turned"] = True
        weight = self.weight.reshape(form["shape"]) * form["scale"]
        return (self.up(x) @ weight).relu().sum()


@pytest.mark.parametrize("training", [True, False])
def test_parameters_keep_their_class_and_attributes(training: bool) -> None:
    model, x = OfBytes().train(training), torch.zeros(4, WIDTH)
    for _ in range(2):
        memopt.anatomy(model, x)
        memopt.plan(model, x, blocks=nn.Linear, measure=False)
        assert memopt.check(model, x).predicted_kept is not None
        assert not model.weight.form["turned"]
    model(x)
    memopt.anatomy(model, x)
    assert model.weight.form["turned"] is not training


class WithTable(torch.optim.SGD):
    """Reads attributes of its own when it steps, as those of bitsandbytes do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1)
        self.table, self.begun = {"signed": torch.zeros(300)}, False

    def step(self, closure: Any = None) -> None:
        self.begun = self.begun or bool(len(self.table))
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["map"] = self.table["signed"]
        super().step()


def test_an_optimizer_with_attributes_of_its_own() -> None:
    """PyTorch copies an optimizer without them. What they hold is there before the first step."""
    model, x = Holds(None), torch.ones(4, WIDTH)
    optimizer = WithTable(model.parameters())
    found = memopt.anatomy(model, x, optimizer=optimizer, measure=True)
    for trace in (found.predicted, found.measured):
        assert trace is not None
        assert trace.peak.by_category["optimizer states"] == optimizer.table["signed"].nbytes
    memopt.plan(model, x, "1GiB", optimizer=optimizer, steps=1).apply().undo()
    assert not optimizer.begun
    assert not optimizer.state


def test_a_schedulers_step_stays_the_users() -> None:
    """It is an attribute that calls the user's optimizer, with the user's parameters."""
    model, x = Holds(None), torch.ones(4, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    memopt.anatomy(model, x, optimizer=optimizer, measure=False)
    assert all(map(torch.equal, before, model.parameters()))
