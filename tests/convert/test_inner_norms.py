"""Proves: a module that gives a weight to what one of torch.nn's norms without parameters returns
(x-transformers' LayerNorm) is one norm; it is the original where the norm inside is another by now,
has hooks or is to be skipped, and what does more is not taken for one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memopt
from tests.convert.support import memopt_ops, one_step

SIZE = 100


class Weighted(nn.Module):
    """x-transformers' LayerNorm."""

    def __init__(self, size: int = SIZE, unit_offset: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.unit_offset = unit_offset
        self.ln: nn.Module = nn.LayerNorm(size, elementwise_affine=False)
        self.gamma = nn.Parameter(torch.randn(size))
        self.beta = nn.Parameter(torch.randn(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.ln(x) * (self.gamma + float(self.unit_offset))
        return y if self.beta is None else y + self.beta


class WeightedRMS(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.RMSNorm(SIZE, elementwise_affine=False)


class WithResidual(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class Twice(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.ln(super().forward(x))
        return output


FORMS: dict[str, tuple[Callable[[], Weighted], str]] = {
    "weight": (Weighted, "layer_norm"),
    "1 + weight": (lambda: Weighted(unit_offset=True), "layer_norm(1 + weight)"),
    "weight and bias": (lambda: Weighted(bias=True), "layer_norm"),
    "RMS": (WeightedRMS, "rms_norm"),
}


def ops(model: nn.Module) -> list[str]:
    return memopt_ops(lambda: model(torch.randn(4, SIZE, requires_grad=True)))


def converted(make: Callable[[], Weighted]) -> tuple[nn.Sequential, nn.Sequential]:
    """A model, and a copy that was converted."""
    torch.manual_seed(0)
    plain = nn.Sequential(make(), nn.Linear(SIZE, SIZE))
    twin = copy.deepcopy(plain)
    memopt.convert(twin, functional=False)
    return plain, twin


@pytest.mark.parametrize(("make", "to"), FORMS.values(), ids=FORMS)
def test_it_is_one_norm(make: Callable[[], Weighted], to: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(make(), nn.Linear(SIZE, SIZE))
    model = copy.deepcopy(plain)
    x = torch.randn(6, SIZE, requires_grad=True)
    report = memopt.convert(model, x)
    assert report.swapped[0][:3] == ("0", type(plain[0]).__qualname__, f"memopt.functional.{to}")
    assert report.bytes_before is not None
    assert report.bytes_after is not None
    # The sample, the statistics; 1 + weight. PyTorch's: x, the norm's output, the product.
    assert report.bytes_after <= x.nbytes + 6 * 2 * 4 + SIZE * 4
    assert report.bytes_after < 0.6 * report.bytes_before
    expected = one_step(lambda: plain(x), x, *plain.parameters())
    ours = one_step(lambda: model(x), x, *model.parameters())
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    memopt.revert(model)
    assert type(model[0]) is type(plain[0])
    assert ops(model) == []


def test_eps_is_the_inner_norm_s_at_each_call() -> None:
    plain, model = converted(Weighted)
    for each in (plain, model):
        each[0].ln.eps = 1.0
    x = torch.randn(3, SIZE)
    assert ops(model)
    torch.testing.assert_close(model(x), plain(x))


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "another module": lambda norm: setattr(norm, "ln", nn.Identity()),
    "parameters": lambda norm: setattr(norm, "ln", nn.LayerNorm(SIZE, bias=False)),
    "a forward of its own": lambda norm: norm.ln.__dict__.update(forward=torch.tanh),
    "an attribute": lambda norm: setattr(norm, "unit_offset", True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_was_changed_since_is_followed(change: Callable[[nn.Module], None]) -> None:
    plain, model = converted(Weighted)
    for each in (plain, model):
        change(each[0])
    x = torch.randn(3, SIZE)
    torch.testing.assert_close(model(x), plain(x))


def test_a_hook_sees_the_inner_norm() -> None:
    _, model = converted(Weighted)
    calls: list[Tensor] = []
    model[0].ln.register_forward_hook(lambda module, args, output: calls.append(output))
    model(torch.randn(3, SIZE))
    assert len(calls) == 1


@pytest.mark.parametrize("make", [WithResidual, Twice])
def test_what_does_more_is_no_norm(make: Callable[[], Weighted]) -> None:
    plain, model = nn.Sequential(make()), nn.Sequential(make())
    model.load_state_dict(plain.state_dict())
    report = memopt.convert(model)
    assert [entry.path for entry in report.swapped] == ["0.ln"]
    x = torch.randn(3, SIZE)
    torch.testing.assert_close(model(x), plain(x))


def test_skipped_inside() -> None:
    model = nn.Sequential(Weighted())
    assert memopt.convert(model, functional=False, skip="0.ln").swapped == ()
    assert ops(model) == []


def rms(x: Tensor, weight: Tensor, eps: float = 1e-3) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class OfFunction(nn.Module):
    """A hand-written norm whose eps is the default of a function that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self.weight)


def test_the_eps_of_keras_is_found_where_forward_does_not_name_it() -> None:
    model = nn.Sequential(OfFunction())
    x, weight = 1e-2 * torch.randn(4, 8), model[0].weight
    (swapped,) = memopt.convert(model).swapped
    assert swapped.to == "memopt.functional.rms_norm"
    torch.testing.assert_close(model(x), rms(x, weight))
