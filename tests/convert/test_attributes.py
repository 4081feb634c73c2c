"""Proves: a module that was known by probes computes what its attributes say at the time of the
call, also when they were changed after convert; and one whose forward does more than compute (sets
an attribute, fills a container) is left alone, and none of it is done while convert looks.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from tests.convert import modules
from tests.convert.support import memopt_ops


class ScaledFeedForward(modules.FeedForward):
    def __init__(self) -> None:
        super().__init__()
        self.act_fn = F.silu
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act_fn(self.w1(x)) * self.w3(x)) * self.scale


class SwitchedRMSNorm(modules.PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__(8)
        self.mode = "on"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.mode == "on" else x


class FeedForwardWithSwish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(8, 8) for _ in range(3))
        self.act = modules.OwnSwish()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


def set_of(path: str, value: object) -> Callable[[nn.Module], None]:
    *parents, name = path.split(".")

    def change(module: nn.Module) -> None:
        setattr(module.get_submodule(".".join(parents)), name, value)

    return change


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], None], bool]] = {
    "a number": (modules.OwnSwish, set_of("beta", 1.0), True),
    "a number of a gated unit": (ScaledFeedForward, set_of("scale", 3.0), True),
    "a function": (ScaledFeedForward, set_of("act_fn", torch.tanh), True),
    "a string": (SwitchedRMSNorm, set_of("mode", "off"), True),
    "a gated unit's activation's": (FeedForwardWithSwish, set_of("act.beta", 1.0), True),
    "eps, which is read": (lambda: modules.PlainRMSNorm(8), set_of("little", 1.0), False),
}


@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy, lambda m: repickled(m)])
@pytest.mark.parametrize(("make", "change", "falls_back"), CHANGES.values(), ids=CHANGES)
def test_changed_after_convert(
    make: Callable[[], nn.Module],
    change: Callable[[nn.Module], None],
    falls_back: bool,
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    report = memopt.convert(model, functional=False)  # swaps alone
    assert "" in [entry.path for entry in report.swapped]
    model = copied(model)
    x = torch.randn(4, 8, requires_grad=True)
    assert memopt_ops(lambda: model(x))
    change(plain)
    change(model)
    assert bool(memopt_ops(lambda: model(x))) != falls_back
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)


def repickled(module: nn.Module) -> nn.Module:
    loaded: nn.Module = pickle.loads(pickle.dumps(module))
    return loaded


class NumberingGELU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.gelu(x)


class NumberingRMSNorm(modules.PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__(8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class ShowingFeedForward(modules.FeedForward):
    """Shows what it was called with, to whoever looks."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return super().forward(x)


class ListingFeedForward(modules.FeedForward):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Size] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.shape)
        return super().forward(x)


@pytest.mark.parametrize(
    ("make", "trace"),
    [
        (NumberingGELU, lambda m: m.calls),
        (NumberingRMSNorm, lambda m: m.calls),
        (ShowingFeedForward, lambda m: int(hasattr(m, "seen"))),
        (ListingFeedForward, lambda m: len(m.seen)),
    ],
)
def test_modules_that_leave_traces_are_left(
    make: Callable[[], nn.Module], trace: Callable[[nn.Module], int]
) -> None:
    model = make()
    assert memopt.convert(model).swapped == ()
    assert trace(model) == 0
    model(torch.randn(2, 8))
    assert trace(model) == 1
