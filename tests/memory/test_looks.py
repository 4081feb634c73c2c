"""A second look at a predicted step knows the optimizer's states and the notes of its step from the
first one, and finds the same bytes at every moment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt.memory.predicted.hollow as hollow
from memopt.memory.ledger import Ledger
from memopt.memory.pieces import STATES
from memopt.memory.predicted.predict import Looks, hollow_step
from memopt.memory.step import Step

Make = Callable[..., torch.optim.Optimizer]


class Lazily(torch.optim.Optimizer):
    """Makes a table at its first step, in no state, and a new state at each."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.table: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.table is None:
            self.table = torch.zeros(1000)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["average"] = p.grad * 2
                    p.add_(self.state[p]["average"])


OPTIMIZERS: dict[str, Make] = {
    "AdamW": torch.optim.AdamW,
    "AdamW, foreach": partial(torch.optim.AdamW, foreach=True),
    "Adam, amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "NAdam": torch.optim.NAdam,
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD, momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Lazily": Lazily,
}


def rows(ledger: Ledger) -> list[tuple[Any, ...]]:
    """What a ledger notes, without pieces' identities and by which operators states were made."""
    noted = [
        (
            *(e.instant, e.sign, ledger.phases[e.instant], e.piece.nbytes, e.piece.category),
            e.piece.op if e.piece.born else "before",
        )
        for e in ledger.log
    ]
    return sorted(noted)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8, bias=False)
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_looks_agree(name: str, target: str) -> None:
    model, x = net(), torch.randn(4, 8)
    step = Step(model, x, OPTIMIZERS[name](model.parameters()), torch.sum, who="test")
    looks = Looks()
    alone = hollow_step(step, None, target).ledger
    first, second, third = (hollow_step(step, None, target, looks=looks).ledger for _ in "abc")
    assert rows(first) == rows(second) == rows(third) == rows(alone)
    assert first.work == second.work == third.work
    assert [(place, piece.nbytes, piece.born) for place, piece in first.scratch] == [
        (place, piece.nbytes, piece.born) for place, piece in third.scratch
    ]


def test_an_optimizer_steps_once_for_all_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = net(), torch.randn(4, 8)
    step = Step(model, x, torch.optim.AdamW(model.parameters()), torch.sum, who="test")
    repeats: list[Any] = []
    repeat = hollow.repeat
    monkeypatch.setattr(hollow, "repeat", lambda *args: (repeats.append(args), repeat(*args)))
    looks = Looks()
    for _ in range(3):
        hollow_step(step, None, "cpu", looks=looks)
    assert len(repeats) == 2


def test_each_optimizer_has_its_own_notes() -> None:
    model, x = net(), torch.randn(4, 8)
    looks = Looks()
    for make in (torch.optim.AdamW, torch.optim.Rprop, torch.optim.AdamW):
        step = Step(model, x, make(model.parameters()), torch.sum, who="test")
        found = rows(hollow_step(step, None, "cpu", looks=looks).ledger)
        assert found == rows(hollow_step(step, None, "cpu").ledger)


def test_other_gradients_have_their_own_notes() -> None:
    """What an optimizer does follows from which parameters have gradients."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(8, 64), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return (self.wide if x.shape[0] == 4 else self.narrow)(x)

    model = Either()
    optimizer = torch.optim.AdamW(model.parameters())
    looks = Looks()
    for count in (4, 3, 4, 3):
        step = Step(model, torch.ones(count, 8), optimizer, torch.sum, who="test")
        found = rows(hollow_step(step, None, "cpu", looks=looks).ledger)
        in_optimizer = {row[3] for row in found if row[2] == "optimizer"}
        assert (64 * 8 * 4 in in_optimizer) == (count == 4)


def test_states_of_what_ran_in_any_look_are_there() -> None:
    """A step that trains other parameters than the looks before it finds the states of both, as
    training does.
    """

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(8, 64, bias=False), nn.Linear(8, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return (self.wide if x.shape[0] == 4 else self.narrow)(x)

    def states(count: int) -> int:
        step = Step(model, torch.ones(count, 8), optimizer, torch.sum, who="test")
        ledger = hollow_step(step, None, "cpu", looks=looks).ledger
        there = [p for p in ledger.pieces if p.category == STATES and p.phase == "before"]
        return sum(piece.nbytes for piece in there)

    model = Either()
    optimizer = torch.optim.AdamW(model.parameters())
    looks = Looks()
    wide, narrow = 2 * 64 * 8 * 4 + 4, 2 * 2 * 8 * 4 + 4
    assert [states(count) for count in (3, 4, 3)] == [narrow, wide + narrow, wide + narrow]
