"""Proves: AddLayerNorm and AddRMSNorm have the constructors and states of torch.nn's norms, run
memopt's ops, and give both the normalised sum and the sum.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import memopt
from tests.support.modules import constructor_parameters
from tests.support.record_ops import RecordOps

PAIRS = [
    (memopt.nn.AddLayerNorm, torch.nn.LayerNorm, "layer_norm"),
    (memopt.nn.AddRMSNorm, torch.nn.RMSNorm, "rms_norm"),
]
every_pair = pytest.mark.parametrize(("ours", "torchs", "norm"), PAIRS)
every_argument = pytest.mark.parametrize(
    "arguments", [{}, {"eps": 1e-3}, {"elementwise_affine": False}, {"dtype": torch.float64}]
)


@every_pair
def test_constructor_takes_torchs_arguments_in_torchs_order(
    ours: Any, torchs: Any, norm: str
) -> None:
    expected = constructor_parameters(torchs)
    assert constructor_parameters(ours)[: len(expected)] == expected


@every_pair
@every_argument
def test_state_of_torchs_norm_loads_and_the_sum_is_normalized(
    ours: Any, torchs: Any, norm: str, arguments: dict[str, Any], device: torch.device
) -> None:
    module = ours(7, device=device, **arguments)
    plain = torchs(7, device=device, **arguments)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter)
    module.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(module.state_dict(), strict=True)
    assert repr(module) == repr(plain).replace(torchs.__name__, ours.__name__)
    dtype = arguments.get("dtype", torch.float32)
    x, residual = torch.randn(2, 3, 7, device=device, dtype=dtype)
    with torch.no_grad(), RecordOps() as ops:
        output, total = module(x, residual)
    (call,) = ops.arguments_of(torch.ops.memopt._norm_forward.default)
    assert len(ops.ops) == 1
    assert call["norm"] == norm
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(output, plain(x + residual))
    again, _ = copy.deepcopy(module)(x, residual)
    assert torch.equal(again, output)


def test_zero_centered_weight(device: torch.device) -> None:
    module = memopt.nn.AddRMSNorm(7, device=device, zero_centered_weight=True)
    plain = memopt.nn.AddRMSNorm(7, device=device)
    assert not module.weight.any()
    x, residual = torch.randn(2, 3, 7, device=device)
    assert torch.equal(module(x, residual)[0], plain(x, residual)[0])
