"""Proves: the output of a converted module requires a gradient exactly where the unconverted one's
does, whichever of input and parameters are frozen, and gradients reach the same tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memopt
from tests.convert import modules

MODULES: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(8),
    "RMSNorm": lambda: nn.RMSNorm(8),
    "GELU": nn.GELU,
    "ReLU": nn.ReLU,
    "Dropout": lambda: nn.Dropout(0.5),
    "own RMS norm": lambda: modules.CentredRMSNorm(8),
    "own layer norm": lambda: modules.NanoLayerNorm(8),
    "gated unit": modules.FeedForward,
    "packed gated unit": lambda: modules.Packed("first"),
    "decorated gated unit": modules.Decorated,
    "transformer layer": lambda: nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0.0, activation="gelu", batch_first=True
    ),
}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_outputs_require_gradients_as_before(make) -> None:
    torch.manual_seed(0)
    plain = make()
    model = nn.Sequential(copy.deepcopy(plain))
    assert memopt.convert(model).swapped
    converted = model[0]
    names = [name for name, _ in plain.named_parameters()]
    # Each tensor alone, all, and none.
    for training in [set(), {"x", *names}, {"x"}, *({name} for name in names)]:
        found = []
        for module in (plain, converted):
            x = torch.randn(2, 3, 8, requires_grad="x" in training)
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(name in training)
            y = module(x)
            assert y.requires_grad == bool(training)
            gradients = set()
            if training:
                y.sum().backward()
                tensors = {"x": x, **dict(module.named_parameters())}
                gradients = {name for name, t in tensors.items() if t.grad is not None}
            module.zero_grad(set_to_none=True)
            found.append((y.requires_grad, gradients))
        assert found[0] == found[1], training
