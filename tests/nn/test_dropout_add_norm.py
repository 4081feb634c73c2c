"""Proves: DropoutAddLayerNorm and DropoutAddRMSNorm have the constructors and states of torch.nn's
norms and p, run memopt's ops in training, and are AddLayerNorm and AddRMSNorm in eval.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import memopt
from tests.support.modules import constructor_parameters
from tests.support.record_ops import RecordOps

nn, ops = memopt.nn, torch.ops.memopt
PAIRS = [
    (
        nn.DropoutAddLayerNorm,
        nn.AddLayerNorm,
        torch.nn.LayerNorm,
        (ops._dropout_add_norm_forward.default, ops._norm_forward.default),
    ),
    (
        nn.DropoutAddRMSNorm,
        nn.AddRMSNorm,
        torch.nn.RMSNorm,
        (ops._dropout_add_norm_forward.default, ops._norm_forward.default),
    ),
]
every_pair = pytest.mark.parametrize(("ours", "plain", "torchs", "pair"), PAIRS)
every_argument = pytest.mark.parametrize(
    "arguments", [{}, {"eps": 1e-3}, {"elementwise_affine": False}, {"dtype": torch.float64}]
)


@every_pair
def test_constructor_takes_torchs_arguments_in_torchs_order(
    ours: Any, plain: Any, torchs: Any, pair: Any
) -> None:
    expected = constructor_parameters(torchs)
    assert constructor_parameters(ours)[: len(expected)] == expected
    assert ours(7).p == 0.5


@every_pair
@every_argument
def test_runs_the_op_in_training_and_the_plain_one_in_eval(
    ours: Any,
    plain: Any,
    torchs: Any,
    pair: Any,
    arguments: dict[str, Any],
    device: torch.device,
) -> None:
    module = ours(7, device=device, p=0.3, **arguments)
    norm = torchs(7, device=device, **arguments)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    module.load_state_dict(norm.state_dict(), strict=True)
    norm.load_state_dict(module.state_dict(), strict=True)
    twin = plain(7, device=device, **arguments)
    twin.load_state_dict(norm.state_dict(), strict=True)
    dtype = arguments.get("dtype", torch.float32)
    x, residual = torch.randn(2, 30, 7, device=device, dtype=dtype)
    with torch.no_grad(), RecordOps() as record:
        torch.manual_seed(0)
        output, total = module(x, residual)
    assert record.ops == [pair[0]]
    torch.manual_seed(0)
    expected = memopt.functional.dropout(x, 0.3) + residual
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(output, norm(expected))
    torch.manual_seed(0)
    again, _ = copy.deepcopy(module)(x, residual)
    assert torch.equal(again, output)
    module.eval()
    with torch.no_grad(), RecordOps() as record:
        outputs = module(x, residual)
    assert record.ops == [pair[1]]
    for a, b in zip(outputs, twin(x, residual), strict=True):
        assert torch.equal(a, b)


@every_pair
def test_repr_says_p(ours: Any, plain: Any, torchs: Any, pair: Any) -> None:
    expected = repr(torchs(7)).replace(torchs.__name__, ours.__name__)
    assert repr(ours(7, p=0.25)) == expected[:-1] + ", p=0.25)"


@every_pair
@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_bad_p_is_named(ours: Any, plain: Any, torchs: Any, pair: Any, p: float) -> None:
    with pytest.raises(ValueError, match=f"{ours.__name__}: p must be between 0 and 1, got {p}"):
        ours(7, p=p)


def test_zero_centered_weight(device: torch.device) -> None:
    module = nn.DropoutAddRMSNorm(7, device=device, zero_centered_weight=True)
    plain = nn.DropoutAddRMSNorm(7, device=device)
    assert not module.weight.any()
    x, residual = torch.randn(2, 3, 7, device=device)
    torch.manual_seed(0)
    expected = plain(x, residual)[0]
    torch.manual_seed(0)
    assert torch.equal(module(x, residual)[0], expected)
