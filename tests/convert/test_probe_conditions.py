"""Proves: a norm, an activation or a gated unit whose code does something else under a condition
that the call brings (autocast, no gradients, a size, numbers that are not finite in 16 bits, a
switch that is turned later) still does so after convert.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt._convert.match import NOT_ALWAYS, READS_SWITCHES
from memopt._convert.rules.code_reads import reads_flags

COLS = 8
SWITCH = False


class Norm(nn.Module):
    other = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(COLS))

    def plain(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Activation(nn.Module):
    other = False

    def plain(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Gated(nn.Module):
    other = False

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(COLS, COLS) for _ in range(3))

    def plain(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


KINDS = [Norm, Activation, Gated]
Forward = Callable[[Any, Tensor], Tensor]


def first_of_one(self: Any, x: Tensor) -> Tensor:
    return x + 1 if x.shape[0] == 1 else self.plain(x)


def many_rows(self: Any, x: Tensor) -> Tensor:
    return x + 1 if x.shape[0] > 40 else self.plain(x)


def many_numbers(self: Any, x: Tensor) -> Tensor:
    return x + 1 if x.numel() >= 1000 else self.plain(x)


def in_autocast(self: Any, x: Tensor) -> Tensor:
    return x + 1 if torch.is_autocast_enabled("cpu") else self.plain(x)


def in_autocast_of_cuda(self: Any, x: Tensor) -> Tensor:
    return x + 1 if torch.is_autocast_enabled() else self.plain(x)


def without_gradients(self: Any, x: Tensor) -> Tensor:
    return self.plain(x) if torch.is_grad_enabled() else x + 1


def not_finite_in_16_bits(self: Any, x: Tensor) -> Tensor:
    if x.dtype == torch.bfloat16 and not torch.isfinite(x).all():
        x = x.nan_to_num()
    return self.plain(x)


def by_a_global(self: Any, x: Tensor) -> Tensor:
    return x + 1 if SWITCH else self.plain(x)


def by_its_class(self: Any, x: Tensor) -> Tensor:
    return x + 1 if self.other else self.plain(x)


ROWS: dict[Forward, int] = {first_of_one: 1, many_rows: 41, many_numbers: 125}
CONDITIONS: list[Forward] = [
    *ROWS, in_autocast, in_autocast_of_cuda, without_gradients, not_finite_in_16_bits, by_a_global,
    by_its_class,
]  # fmt: skip


def of_class(base: type[nn.Module], forward: Forward) -> nn.Module:
    return type(forward.__name__, (base,), {"forward": forward})()


@pytest.mark.parametrize("base", KINDS)
@pytest.mark.parametrize("forward", CONDITIONS, ids=lambda forward: forward.__name__)
def test_what_a_condition_changes_is_as_before(
    base: type[nn.Module], forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = nn.Sequential(of_class(base, forward), nn.Linear(COLS, COLS))
    x = torch.randn(ROWS.get(forward, 3), COLS)
    if forward is not_finite_in_16_bits:
        plain = plain.bfloat16()
        x = x.bfloat16()
        x[0, 0] = float("inf")
    model = copy.deepcopy(plain)
    memopt.convert(model)
    monkeypatch.setattr("tests.convert.test_probe_conditions.SWITCH", True)
    monkeypatch.setattr(type(plain[0]), "other", True)
    if forward is in_autocast_of_cuda:
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cuda": True)
    scopes: dict[Forward, Any] = {
        in_autocast: torch.autocast("cpu", torch.bfloat16),
        without_gradients: torch.no_grad(),
    }
    with scopes.get(forward, nullcontext()):
        ours, theirs = model[0](x), plain[0](x)
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("base", KINDS)
@pytest.mark.parametrize(
    ("forward", "reason"),
    [(in_autocast_of_cuda, NOT_ALWAYS), (by_a_global, READS_SWITCHES)],
    ids=["CUDA's", "global"],
)
def test_such_a_module_is_left_and_the_report_says_why(
    base: type[nn.Module], forward: Forward, reason: str
) -> None:
    model = nn.Sequential(of_class(base, forward), nn.Linear(COLS, COLS))
    report = memopt.convert(model)
    assert type(model[0]).forward is forward
    assert ("0", reason) in [(entry.path, entry.reason) for entry in report.left]


@pytest.mark.parametrize("base", [Norm, Activation])
def test_a_module_that_ends_the_program_is_left(base: type[nn.Module]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        raise SystemExit(3)

    model = nn.Sequential(of_class(base, forward), nn.Linear(COLS, COLS))
    memopt.convert(model)
    assert type(model[0]).forward is forward


@pytest.mark.parametrize("base", KINDS)
def test_without_a_condition_it_is_converted(base: type[nn.Module]) -> None:
    model = nn.Sequential(of_class(base, lambda self, x: self.plain(x)), nn.Linear(COLS, COLS))
    before = type(model[0])
    memopt.convert(model)
    assert type(model[0]) is not before


bias = True
is_cuda = True


class NormBesideGlobals(nn.Module):
    """Reads attributes whose names are also globals of its file."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        assert not x.is_cuda
        return torch.nn.functional.layer_norm(x, (8,), self.weight, self.bias, 1e-5)


def test_an_attribute_is_no_switch_for_the_name_of_a_global() -> None:
    assert not reads_flags(NormBesideGlobals())
