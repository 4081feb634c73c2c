"""Proves: memopt.nn.LayerNorm and RMSNorm take the places of torch.nn's: same constructor, repr,
state_dict keys and initial values, states load both ways; and run memopt's op, RMSNorm also with a
weight around 0.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memopt
from tests.support.modules import assert_copies, assert_same_state, constructor_parameters
from tests.support.record_ops import RecordOps

ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"eps": 1e-3},
    {"bias": False},
    {"elementwise_affine": False},
    {"dtype": torch.float64},
]
every_norm = pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
every_argument = pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param(name, arguments, id=f"{name}-{arguments}")
        for name in ("LayerNorm", "RMSNorm")
        for arguments in ARGUMENTS
        if name == "LayerNorm" or "bias" not in arguments
    ],
)
every_shape = pytest.mark.parametrize("shape", [7, (7,), [5, 7], torch.Size([5, 7])], ids=str)


def example(module: torch.nn.Module, device: torch.device) -> torch.Tensor:
    parameters = list(module.parameters())
    dtype = parameters[0].dtype if parameters else torch.float32
    return torch.randn(3, 5, 7, device=device, dtype=dtype)


def pair(name: str, shape: Any, **arguments: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """memopt's and torch's."""
    return getattr(memopt.nn, name)(shape, **arguments), getattr(torch.nn, name)(shape, **arguments)


@every_norm
def test_constructor_takes_torchs_arguments_in_torchs_order(name: str) -> None:
    expected = constructor_parameters(getattr(torch.nn, name))
    ours = constructor_parameters(getattr(memopt.nn, name))
    assert (ours if name == "LayerNorm" else ours[: len(expected)]) == expected
    bias = (False,) if name == "LayerNorm" else ()
    module = getattr(memopt.nn, name)(7, 1e-3, True, *bias, "meta", torch.float16)
    assert (module.eps, getattr(module, "bias", None)) == (1e-3, None)
    assert module.weight.device.type == "meta"
    assert module.weight.dtype == torch.float16


@every_argument
@every_shape
def test_looks_like_torchs(name: str, shape: Any, arguments: dict[str, Any]) -> None:
    module, twin = pair(name, shape, **arguments)
    assert isinstance(module, type(twin))
    assert repr(module) == repr(twin)
    assert module.normalized_shape == twin.normalized_shape
    for key, value in twin.state_dict().items():
        assert torch.equal(module.state_dict()[key], value), key


@every_argument
@every_shape
def test_state_and_copies(
    name: str, shape: Any, arguments: dict[str, Any], device: torch.device
) -> None:
    module, twin = pair(name, shape, device=device, **arguments)
    x = example(module, device)
    assert_same_state(module, twin, x)
    assert_copies(module, x)


@every_argument
@pytest.mark.parametrize("zero_centered", [False, True])
def test_runs_the_op(
    name: str, arguments: dict[str, Any], zero_centered: bool, device: torch.device
) -> None:
    if name == "LayerNorm":
        if zero_centered:
            pytest.skip("LayerNorm has no such weight")
        module = memopt.nn.LayerNorm(7, device=device, **arguments)
    else:
        module = memopt.nn.RMSNorm(
            7, device=device, **arguments, zero_centered_weight=zero_centered
        )
    x = example(module, device)
    with torch.no_grad(), RecordOps() as ops:
        output = module(x)
    assert ops.ops == [torch.ops.memopt._norm_forward.default]
    if name == "LayerNorm":
        expected = memopt.functional.layer_norm(x, (7,), module.weight, module.bias, module.eps)
    else:
        expected = memopt.functional.rms_norm(
            x, (7,), module.weight, module.eps, zero_centered_weight=zero_centered
        )
    assert torch.equal(output, expected)


def test_zero_centered_weight_begins_at_zero(device: torch.device) -> None:
    """So a new module does what a new plain one does."""
    module = memopt.nn.RMSNorm(7, device=device, zero_centered_weight=True)
    assert not module.weight.any()
    assert "zero_centered_weight=True" in repr(module)
    x = example(module, device)
    assert torch.equal(module(x), memopt.nn.RMSNorm(7, device=device)(x))
    assert_copies(module, x)


@every_norm
def test_float32_parameters_beside_a_16_bit_input(name: str, device: torch.device) -> None:
    module, _ = pair(name, 7, device=device)
    x = example(module, device).bfloat16()
    output = module(x)
    output.sum().backward()
    assert output.dtype == torch.bfloat16
    assert module.weight.grad.dtype == torch.float32


@every_norm
def test_trains(name: str, device: torch.device) -> None:
    """A step along the gradients lowers the loss."""
    module, _ = pair(name, 7, device=device)
    x = example(module, device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        loss = (module(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
