"""Proves: where the code around a norm by hand writes the norm's input in place, which the norm
allows since it keeps only what it has computed, the converted model trains as before; elsewhere no
copy is kept.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._convert.rules.norm_swap import NormSwap
from memopt._convert.swap import swap_of

COLS = 8


class RowNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, COLS))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class ChannelNorm(nn.Module):
    """Centred first: what is kept is no part of the input, in any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, COLS))
        self.bias = nn.Parameter(torch.zeros(COLS))

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(1, keepdim=True)
        x = x / torch.sqrt(x.square().mean(1, keepdim=True) + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class Block(nn.Module):
    def __init__(self, norm: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.layer = copy.deepcopy(layer), norm, layer


class Sum(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h += self.layer(self.norm(h))
        return h


class Add(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return h.add_(self.inner(h))

    def inner(self, h: Tensor) -> Tensor:
        return self.layer(self.norm(h))


class NoWrite(Block):
    def forward(self, x: Tensor) -> Tensor:
        outputs: tuple[Any, ...] = ()
        h, count = self.first(x), 0
        outputs += (h,)
        count += 1
        return outputs[0] + self.layer(self.norm(h)) * count


def rows(kind: type[Block]) -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    block = kind(RowNorm(), nn.Linear(COLS, COLS)).bfloat16()
    return block, torch.randn(5, COLS).bfloat16()


def channels(kind: type[Block]) -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    return kind(ChannelNorm(), nn.Conv2d(COLS, COLS, 1)), torch.randn(2, COLS, 3, 4)


@pytest.mark.parametrize("kind", [Sum, Add])
@pytest.mark.parametrize("make", [rows, channels])
def test_an_input_that_is_written_behind_a_norm_that_allows_it(make: Any, kind: Any) -> None:
    plain, x = make(kind)
    model = copy.deepcopy(plain)
    assert memopt.convert(model).swapped
    for each in (model, plain):
        each(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        tolerance = 5e-2 if x.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("make", [rows, channels])
def test_a_copy_is_kept_only_where_something_seems_to_be_written(make: Any) -> None:
    for kind in (Sum, Add, NoWrite):
        model, _ = make(kind)
        memopt.convert(model)
        swap = swap_of(model.norm)
        assert isinstance(swap, NormSwap)
        assert swap.is_written == (kind is not NoWrite)


def test_nor_where_the_norm_keeps_its_input_itself() -> None:
    model, x = rows(Sum)
    model = model.float()
    memopt.convert(model)
    with pytest.raises(RuntimeError, match="in place"):
        model(x.float()).sum().backward()
