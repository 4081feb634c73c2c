"""Proves: without `blocks=` a plan's blocks are those of structure, unless what a step holds shows
others with a lower peak; and no more steps are predicted for that than two for each way.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._checkpoint.blocks import find_blocks
from memopt._plan import found as found_module
from memopt._plan.plan import Plan
from tests.plan.models import Block
from tests.plan.strangers import Tower
from tests.plan.support import looks, planned_or_refused

WIDTH = 16


class Wave(nn.Module):
    """No layer to look at, and keeps little that is not passed on."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Parameter(torch.ones(WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (x * self.one + self.two * self.three).sin()
        return out


class Branch(nn.ModuleList):
    """What runs between its modules is a part of none of them."""

    def __init__(self) -> None:
        super().__init__(Wave() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for wave in self:
            x = wave(x).exp().cos()
        return x


class Branched(nn.Module):
    """A region around a module of a branch drops next to nothing, and one around a branch most."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Branch(), Branch(), Branch()

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x) + self.b(x) + self.c(x)).square().mean()


class Stem(nn.Module):
    """Keeps more in front of its alike blocks than in these, in modules of three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (
            type(f"Stem{width}", (Block,), {})(WIDTH, width) for width in (6, 7, 8)
        )
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.one, self.two, self.three, *self.blocks):
            x = block(x)
        return x.square().mean()


class Holders(nn.Module):
    """The elements of its list are never called, only what is in them (SqueezeBERT)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Holder() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer.second(layer.first(x))
        return x.square().mean()


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(WIDTH), Block(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("not called")


def batch(rows: int = 64) -> Tensor:
    return torch.randn(rows, 32, WIDTH, generator=torch.Generator().manual_seed(1))


def planned(model: nn.Module, **options: Any) -> Plan:
    return memopt.plan(model, batch(), 1 << 30, measure=False, optimizer=None, **options)


def floor(plan: Plan) -> int:
    _, error = planned_or_refused(plan, plan.profile.base + 1)
    assert error is not None
    return error.floor


def structure(model: nn.Module) -> list[str]:
    modules = find_blocks(model)
    return [path for path, module in model.named_modules() if module in modules]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Branched, {"a", "b", "c"}),
        (Stem, {"one", "two", "three", *(f"blocks.{n}" for n in range(3))}),
    ],
    ids=["around structure's", "beside structure's"],
)
def test_blocks_with_a_lower_floor_are_taken(make: Any, expected: set[str]) -> None:
    torch.manual_seed(0)
    model = make()
    plan, other = planned(model), planned(model, blocks=structure(model))
    assert set(plan.profile.blocks) == expected != set(other.profile.blocks)
    least = floor(plan)
    assert least - plan.profile.base < 0.8 * (floor(other) - plan.profile.base)
    plan = plan.within(least)
    plan.apply()
    assert plan.measured_peak == plan.peak == least
    plan.undo()


def test_elements_that_are_never_called_give_way_to_what_is_in_them() -> None:
    model = Holders()
    expected = {f"layers.{n}.{part}" for n in range(3) for part in ("first", "second")}
    assert set(planned(model).profile.blocks) == expected


def test_of_alike_blocks_no_further_step_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree of one step shows that others would not be better."""

    class Chain(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            return out.square().mean()

    monkeypatch.setattr(found_module, "predicted", None)
    model = Chain(*(Block(WIDTH) for _ in range(12)))
    assert planned(model).profile.blocks == tuple(map(str, range(12)))


def test_a_batch_that_the_model_refuses_is_named() -> None:
    model = Stem()
    before = looks(model)
    with pytest.raises(RuntimeError, match="normalized_shape") as error:
        memopt.plan(model, torch.randn(2, 3), 1 << 30, measure=False)
    (note,) = error.value.__notes__
    assert note == "plan: Stem raised this with the batch. It is as it was before."
    assert looks(model) == before


def test_a_block_that_is_given_twice_is_named() -> None:
    with pytest.raises(ValueError, match=r"must name each module once, got 'blocks.0' twice"):
        planned(Stem(), blocks=["blocks.0", "blocks.1", "blocks.0"])


class Remembers(nn.Module):
    """A wide layer that reads what its call before left."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 1024), nn.Linear(1024, 16)
        self.before: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        longer = x if self.before is None else torch.cat([self.before, x], 1)
        self.before = x[:, :1].detach()
        return self.narrow(self.wide(longer).tanh())[:, -x.shape[1] :]


class WithMemory(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = Remembers(), Remembers()

    def forward(self, x: Tensor) -> Tensor:
        self.stem.before = self.head.before = None
        return self.head(super().forward(self.stem(x))).square().mean()


def test_blocks_are_compared_without_regions_that_cannot_run_again() -> None:
    """The tree of calls shows that stem and head keep most, and their recompute would not be their
    forward (diffusers' Magvit).
    """
    model, x = WithMemory(), torch.randn(4, 32, 16)
    plan = memopt.plan(model, x, 1 << 30, measure=False)
    found, error = planned_or_refused(plan, 1)
    assert error is not None
    found = plan.within(error.floor).apply()
    model(x).backward()
    found.undo()
