"""Proves: memopt.nn.LayerNorm takes torch.nn.LayerNorm's place: same constructor, repr, state_dict
keys and initial values, states load both ways; and runs memopt's op.
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
every_argument = pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
every_shape = pytest.mark.parametrize("shape", [7, (7,), [5, 7], torch.Size([5, 7])], ids=str)


def example(module: torch.nn.Module, device: torch.device) -> torch.Tensor:
    parameters = list(module.parameters())
    dtype = parameters[0].dtype if parameters else torch.float32
    return torch.randn(3, 5, 7, device=device, dtype=dtype)


def test_constructor_takes_torchs_arguments_in_torchs_order() -> None:
    expected = constructor_parameters(torch.nn.LayerNorm)
    assert constructor_parameters(memopt.nn.LayerNorm) == expected
    module = memopt.nn.LayerNorm(7, 1e-3, True, False, "meta", torch.float16)
    assert (module.eps, module.bias) == (1e-3, None)
    assert module.weight.device.type == "meta"
    assert module.weight.dtype == torch.float16


@every_argument
@every_shape
def test_looks_like_torchs(shape: Any, arguments: dict[str, Any]) -> None:
    module = memopt.nn.LayerNorm(shape, **arguments)
    twin = torch.nn.LayerNorm(shape, **arguments)
    assert isinstance(module, torch.nn.LayerNorm)
    assert repr(module) == repr(twin)
    assert module.normalized_shape == twin.normalized_shape
    for name, value in twin.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


@every_argument
@every_shape
def test_state_and_copies(shape: Any, arguments: dict[str, Any], device: torch.device) -> None:
    module = memopt.nn.LayerNorm(shape, device=device, **arguments)
    twin = torch.nn.LayerNorm(shape, device=device, **arguments)
    x = example(module, device)
    assert_same_state(module, twin, x)
    assert_copies(module, x)


@every_argument
def test_runs_the_op(arguments: dict[str, Any], device: torch.device) -> None:
    module = memopt.nn.LayerNorm(7, device=device, **arguments)
    x = example(module, device)
    with torch.no_grad(), RecordOps() as ops:
        output = module(x)
    assert ops.ops == [torch.ops.memopt._norm_forward.default]
    expected = memopt.functional.layer_norm(x, (7,), module.weight, module.bias, module.eps)
    assert torch.equal(output, expected)


def test_float32_parameters_beside_a_16_bit_input(device: torch.device) -> None:
    module = memopt.nn.LayerNorm(7, device=device)
    x = example(module, device).bfloat16()
    output = module(x)
    output.sum().backward()
    assert output.dtype == torch.bfloat16
    assert module.weight.grad.dtype == torch.float32


def test_trains(device: torch.device) -> None:
    """A step along the gradients lowers the loss."""
    module = memopt.nn.LayerNorm(7, device=device)
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
