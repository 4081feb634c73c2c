"""Proves: memopt.nn.LayerNormGELU is LayerNorm's constructor and state with gelu behind it; the
state of the LayerNorm in Sequential(LayerNorm, GELU) loads into it and gives the same results.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memopt
from tests.support.modules import assert_copies, constructor_parameters
from tests.support.record_ops import RecordOps

every_form = pytest.mark.parametrize("approximate", ["none", "tanh"])
every_argument = pytest.mark.parametrize(
    "arguments", [{}, {"eps": 1e-3}, {"bias": False}, {"elementwise_affine": False}], ids=str
)


def test_constructor_is_layer_norms_and_approximate() -> None:
    parameters = constructor_parameters(memopt.nn.LayerNormGELU)
    assert parameters == [*constructor_parameters(torch.nn.LayerNorm), "approximate"]


@every_form
@every_argument
def test_repr_names_everything(approximate: str, arguments: dict[str, Any]) -> None:
    norm = torch.nn.LayerNorm((5, 7), **arguments)
    module = memopt.nn.LayerNormGELU((5, 7), approximate=approximate, **arguments)
    assert repr(module) == f"LayerNormGELU({norm.extra_repr()}, approximate='{approximate}')"


@every_form
@every_argument
def test_takes_the_state_of_the_layer_norm_in_a_pair(
    approximate: str, arguments: dict[str, Any], device: torch.device
) -> None:
    norm = torch.nn.LayerNorm(7, device=device, **arguments)
    pair = torch.nn.Sequential(norm, torch.nn.GELU(approximate))
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    module = memopt.nn.LayerNormGELU(7, device=device, approximate=approximate, **arguments)
    module.load_state_dict(norm.state_dict())
    x = torch.randn(3, 5, 7, device=device)
    torch.testing.assert_close(module(x), pair(x))
    norm.load_state_dict(module.state_dict())
    assert_copies(module, x)


@every_form
def test_runs_the_op(approximate: str, device: torch.device) -> None:
    module = memopt.nn.LayerNormGELU(7, device=device, approximate=approximate)
    x = torch.randn(3, 7, device=device)
    with torch.no_grad(), RecordOps() as ops:
        output = module(x)
    assert ops.ops == [torch.ops.memopt._norm_forward.default]
    expected = memopt.functional.layer_norm_gelu(
        x, (7,), module.weight, module.bias, module.eps, approximate
    )
    assert torch.equal(output, expected)
