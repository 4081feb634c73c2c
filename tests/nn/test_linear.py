"""Proves: the modules with a linear behind compute what the pair of modules does, on the same
parameters and under the same keys, and can be made of a pair and taken apart into one.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import memopt.nn as mnn

PAIRS = {
    "LayerNormLinear": (mnn.LayerNormLinear, lambda: nn.LayerNorm(6, eps=1e-3)),
    "RMSNormLinear": (mnn.RMSNormLinear, lambda: nn.RMSNorm(6, eps=1e-3)),
    "zero-centred": (mnn.RMSNormLinear, lambda: mnn.RMSNorm(6, zero_centered_weight=True)),
    "GELULinear": (mnn.GELULinear, lambda: nn.GELU("tanh")),
}
every_pair = pytest.mark.parametrize(("kind", "make"), PAIRS.values(), ids=PAIRS.keys())


@every_pair
def test_made_of_a_pair_it_computes_what_the_pair_does(kind, make) -> None:
    front, linear = make(), nn.Linear(6, 4)
    fused = kind.from_modules(front, linear)
    x = torch.randn(3, 6)
    torch.testing.assert_close(fused(x), linear(front(x)), rtol=1e-5, atol=1e-6)
    fused(x).sum().backward()
    assert linear.weight.grad is not None
    first, second = fused.to_modules()
    assert second is linear
    assert type(first).__name__ == type(front).__name__


@pytest.mark.parametrize("name", ["LayerNormLinear", "RMSNormLinear", "GELULinear"])
def test_keys_and_copies(name: str) -> None:
    module = getattr(mnn, name)(6, 4, bias=False)
    keys = {"linear.weight"}
    if "Norm" in name:
        keys |= {"norm.weight"} | ({"norm.bias"} if name.startswith("Layer") else set())
    assert set(module.state_dict()) == keys
    twin = copy.deepcopy(module)
    twin.load_state_dict(module.state_dict())
    x = torch.randn(2, 6)
    assert torch.equal(twin(x), module(x))
    assert name in repr(module)


def test_bad_pairs() -> None:
    with pytest.raises(TypeError, match=r"LayerNormLinear\.from_modules: takes a LayerNorm and a"):
        mnn.LayerNormLinear.from_modules(nn.RMSNorm(6), nn.Linear(6, 4))
    with pytest.raises(TypeError, match="got Conv1d"):
        mnn.GELULinear.from_modules(nn.GELU(), nn.Conv1d(1, 1, 1))
    with pytest.raises(ValueError, match="must be over the linear's 6 features, got"):
        mnn.RMSNormLinear.from_modules(nn.RMSNorm(5), nn.Linear(6, 4))
