"""Proves: what a probe finds of a model's modules is found once for all steps of it that are
predicted, and anew for another model, or outside of predictions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt._convert.rules.norm_probe import NormProbe
from memopt.memory.known import known_facts, with_facts


class Norm(nn.Module):
    """Known by what it computes alone."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = Norm(size)
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Net(nn.Module):
    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules that are probed for a norm's formula."""
    found: list[nn.Module] = []
    candidates = NormProbe.candidates

    def noting(probe: NormProbe) -> Iterator[Any]:
        found.append(probe._module)
        return candidates(probe)

    monkeypatch.setattr(NormProbe, "candidates", noting)
    return found


def test_a_plan_probes_what_one_conversion_does(probed: list[nn.Module]) -> None:
    """Each of its predicted steps converts a copy of the model, and probed it again."""
    memopt.convert(Net())
    once = len(probed)
    probed.clear()
    model, x = Net(), torch.randn(4, 8, 16)
    plan = memopt.plan(model, x, "1GiB", steps=1)
    plan.within(plan.plain_peak - 1)
    plan.largest_batch("1MiB")
    assert 0 < len(probed) <= once


def test_another_model_is_probed_anew(probed: list[nn.Module]) -> None:
    memopt.convert(Net())
    first = len(probed)
    memopt.convert(Net())
    assert len(probed) == 2 * first > 0


def test_facts_are_those_of_the_scope() -> None:
    facts: dict[Any, Any] = {}
    known_facts()["a"] = 1
    assert not known_facts()
    with with_facts(facts):
        known_facts()["b"] = 2
        with with_facts({}):
            assert not known_facts()
        assert known_facts() is facts
    assert facts == {"b": 2}
    assert not known_facts()
