"""Proves: AddLayerNorm and AddRMSNorm have the constructors and states of torch.nn's norms, run
memopt's ops, and give both the normalised sum and the sum; DropoutAddLayerNorm and
DropoutAddRMSNorm have p as well, drop in training, and are those two in eval.
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
NORMS = ("LayerNorm", "RMSNorm")
every_norm = pytest.mark.parametrize("norm", NORMS)
every_module = pytest.mark.parametrize(
    ("ours", "norm"), [(f"{kind}{norm}", norm) for kind in ("Add", "DropoutAdd") for norm in NORMS]
)
every_argument = pytest.mark.parametrize(
    "arguments", [{}, {"eps": 1e-3}, {"elementwise_affine": False}, {"dtype": torch.float64}]
)


def with_state_of_torchs(
    ours: str, norm: str, device: torch.device, arguments: dict[str, Any], **more: Any
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The module and torch.nn's, with the same random weights: states load both ways."""
    module = getattr(nn, ours)(7, device=device, **arguments, **more)
    plain = getattr(torch.nn, norm)(7, device=device, **arguments)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter)
    module.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(module.state_dict(), strict=True)
    return module, plain


@every_module
def test_constructor_takes_torchs_arguments_in_torchs_order(ours: str, norm: str) -> None:
    expected = constructor_parameters(getattr(torch.nn, norm))
    assert constructor_parameters(getattr(nn, ours))[: len(expected)] == expected
    if ours.startswith("Dropout"):
        assert getattr(nn, ours)(7).p == 0.5


@every_norm
@every_argument
def test_state_of_torchs_norm_loads_and_the_sum_is_normalized(
    norm: str, arguments: dict[str, Any], device: torch.device
) -> None:
    module, plain = with_state_of_torchs(f"Add{norm}", norm, device, arguments)
    assert repr(module) == repr(plain).replace(norm, f"Add{norm}")
    dtype = arguments.get("dtype", torch.float32)
    x, residual = torch.randn(2, 3, 7, device=device, dtype=dtype)
    with torch.no_grad(), RecordOps() as record:
        output, total = module(x, residual)
    (call,) = record.arguments_of(ops._norm_forward.default)
    assert len(record.ops) == 1
    assert call["norm"] == {"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}[norm]
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(output, plain(x + residual))
    again, _ = copy.deepcopy(module)(x, residual)
    assert torch.equal(again, output)


@every_norm
@every_argument
def test_drops_in_training_and_is_the_plain_one_in_eval(
    norm: str, arguments: dict[str, Any], device: torch.device
) -> None:
    module, plain = with_state_of_torchs(f"DropoutAdd{norm}", norm, device, arguments, p=0.3)
    twin = getattr(nn, f"Add{norm}")(7, device=device, **arguments)
    twin.load_state_dict(plain.state_dict(), strict=True)
    dtype = arguments.get("dtype", torch.float32)
    x, residual = torch.randn(2, 30, 7, device=device, dtype=dtype)
    with torch.no_grad(), RecordOps() as record:
        torch.manual_seed(0)
        output, total = module(x, residual)
    assert record.ops == [ops._dropout_add_norm_forward.default]
    torch.manual_seed(0)
    expected = memopt.functional.dropout(x, 0.3) + residual
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(output, plain(expected))
    torch.manual_seed(0)
    again, _ = copy.deepcopy(module)(x, residual)
    assert torch.equal(again, output)
    module.eval()
    with torch.no_grad(), RecordOps() as record:
        outputs = module(x, residual)
    assert record.ops == [ops._norm_forward.default]
    for a, b in zip(outputs, twin(x, residual), strict=True):
        assert torch.equal(a, b)


@every_norm
def test_repr_says_p(norm: str) -> None:
    expected = repr(getattr(torch.nn, norm)(7)).replace(norm, f"DropoutAdd{norm}")
    assert repr(getattr(nn, f"DropoutAdd{norm}")(7, p=0.25)) == expected[:-1] + ", p=0.25)"


@every_norm
@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_bad_p_is_named(norm: str, p: float) -> None:
    rule = f"DropoutAdd{norm}: p must be between 0 and 1, got {p}"
    with pytest.raises(ValueError, match=rule):
        getattr(nn, f"DropoutAdd{norm}")(7, p=p)


@pytest.mark.parametrize("name", ["AddRMSNorm", "DropoutAddRMSNorm"])
def test_zero_centered_weight(name: str, device: torch.device) -> None:
    module = getattr(nn, name)(7, device=device, zero_centered_weight=True)
    plain = getattr(nn, name)(7, device=device)
    assert not module.weight.any()
    x, residual = torch.randn(2, 3, 7, device=device)
    torch.manual_seed(0)
    expected = plain(x, residual)[0]
    torch.manual_seed(0)
    assert torch.equal(module(x, residual)[0], expected)
