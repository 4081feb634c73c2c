"""Proves that memopt.compile needs no native library: its gradients are eager's, also those of a
head, whose logits are made, and a budget is obeyed or refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def test_gradients_within_a_budget_are_those_of_eager() -> None:
    plain, x = model(), torch.randn(128, 16)
    compiled = memopt.compile(copy.deepcopy(plain), budget="1MB")

    def gradients(module: nn.Module) -> list[Tensor]:
        return list(torch.autograd.grad(module(x).square().mean(), list(module.parameters())))

    for ours, theirs in zip(gradients(compiled), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_head_makes_its_logits() -> None:
    torch.manual_seed(0)
    head, x = nn.Linear(8, 24_576), torch.randn(256, 8)
    target = torch.arange(256)

    def gradient(loss: Callable[[], Tensor]) -> Tensor:
        return torch.autograd.grad(loss(), [head.weight])[0]

    def loss() -> Tensor:
        return F.cross_entropy(head(x), target)

    torch.testing.assert_close(gradient(memopt.compile(loss)), gradient(loss))


def test_a_budget_below_the_floor_is_refused() -> None:
    compiled = memopt.compile(model(), budget=1000)
    with pytest.raises(Exception, match="budget"):
        compiled(torch.randn(128, 16)).square().mean().backward()
