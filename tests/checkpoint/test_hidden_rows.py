"""Proves: a call that mixes rows is refused in chunks, and chosen by nobody, also where its weights
hide that at the first call. Residual branches begin at zero or a millionth (LayerScale, adaLN-zero,
projections of zeros), tables of positions at zero; what they become after a step shows no probe of
values. Calls on each row alone that mind what is no number are taken as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt._checkpoint import checkpoint, checkpoint_wrapper, disable_checkpointing
from tests.checkpoint.test_rows import CrossGradient, Function
from tests.plan.support import floor_of
from tests.support.bits import assert_same_bits

H = 16


class Attention(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(H), nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.scale = nn.Parameter(torch.full((H,), scale))

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        q, k, v = (t.unsqueeze(-3) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = self.scale * self.out(F.scaled_dot_product_attention(q, k, v).squeeze(-3))
        return x + (y if gate is None else gate * y)


def without_projection(to: float) -> Attention:
    made = Attention()
    for parameter in made.out.parameters():
        nn.init.constant_(parameter, to)
    return made


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(1, 1, 64, H))
        self.mlp = nn.Sequential(nn.Linear(H, 4 * H), nn.GELU(), nn.Linear(4 * H, H))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.table[0, :, : x.shape[1]])


HIDDEN: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], str]] = {
    "scale of zero": (lambda: Attention(0.0), (), "can depend on other rows"),
    "LayerScale": (lambda: Attention(1e-6), (), "can depend on other rows"),
    "projection of zeros": (lambda: without_projection(0.0), (), "can depend on other rows"),
    "adaLN-zero": (Attention, (torch.zeros(1, 1, H),), "can depend on other rows"),
    "positions of zero": (Positions, (), r"runs others \(slice to"),
}


@pytest.mark.parametrize("wrapper", [False, True])
@pytest.mark.parametrize("name", HIDDEN)
def test_what_weights_hide_is_refused(name: str, wrapper: bool) -> None:
    make, arguments, said = HIDDEN[name]
    module, x = make(), torch.randn(2, 12, H)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    if wrapper:
        call: Callable[..., Any] = checkpoint_wrapper(module, chunks=3)
    else:
        call = functools.partial(checkpoint, module, chunks=3)
    with torch.autograd.set_detect_anomaly(True), pytest.raises(ValueError, match=said):
        call(x, *arguments)
    assert_same_bits(module.state_dict().values(), before.values())
    assert all(parameter.grad is None for parameter in module.parameters())


class Block(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.attention = Attention(scale)
        self.mlp = nn.Sequential(nn.Linear(H, 4 * H), nn.GELU(), nn.Linear(4 * H, H))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.mlp(x)


@pytest.mark.parametrize("scale", [0.0, 1e-6])
@pytest.mark.parametrize("chosen", ["convert", "apply", "plan"])
def test_the_blocks_of_such_a_model_run_whole(chosen: str, scale: float) -> None:
    """After a step they mix their rows, and gradients are those of the plain model."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block(scale) for _ in range(3))), torch.randn(2, 32, H)
    if chosen == "convert":
        report = memopt.convert(model, x, checkpoint=True, chunks=4, recipes=False)
        assert set(report.in_chunks) == {f"{n}.mlp" for n in range(3)}
    elif chosen == "apply":
        memopt.apply_activation_checkpointing(model, batch=x, chunks=4)
    else:
        plan = memopt.plan(model, x, loss=lambda y: y.square().mean(), measure=False, steps=1)
        plan.within(floor_of(plan).floor).apply()
    with torch.no_grad():
        for block in model:
            assert isinstance(block, Block)
            block.attention.scale.fill_(1.0)
    model(x).square().sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with disable_checkpointing():
        model(x).square().sum().backward()
    for one, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad)


def refuses(x: Tensor) -> Tensor:
    if not x.isfinite().all():
        raise FloatingPointError
    return x.exp()


seen: list[bool] = []


def draws(x: Tensor) -> Tensor:
    seen.append(bool(x.isfinite().all()))
    return x * torch.bernoulli(x.sigmoid())


def indexes(x: Tensor) -> Tensor:
    seen.append(bool(x.isfinite().all()))
    return x * (x.sigmoid() * 3).long()


@pytest.mark.parametrize("function", [refuses, draws, indexes])
def test_calls_that_mind_what_is_no_number(function: Callable[[Tensor], Tensor]) -> None:
    """A probability or an index made of it would end a process on a GPU, so none is."""
    seen.clear()
    x = torch.randn(24, H)
    checkpoint(Function(function), x, chunks=3)
    assert all(seen)


def test_complex_rows() -> None:
    """They have gradients as real ones have, and products of them are rounded too."""
    weight = torch.randn(H, H, dtype=torch.complex64)
    x = torch.randn(24, H, dtype=torch.complex64)
    fine = Function(lambda x: (x @ weight) * x.conj())
    torch.testing.assert_close(checkpoint(fine, x, chunks=3), fine(x))
    for mixing in (lambda x: x + 0 * x.mean(0), lambda x: CrossGradient.apply(x)):
        with pytest.raises(ValueError, match="of one row"):
            checkpoint(Function(mixing), x, chunks=3)
