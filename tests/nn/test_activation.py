"""Proves: memopt.nn's activations take the place of torch.nn's: same constructor, repr, (empty)
state, results; and run memopt's ops.
"""

from __future__ import annotations

import pytest
import torch

import memopt
from tests.support.modules import assert_copies, assert_same_state, constructor_parameters
from tests.support.record_ops import RecordOps

every_form = pytest.mark.parametrize("approximate", ["none", "tanh"])


def test_gelu_constructor_and_repr() -> None:
    assert constructor_parameters(memopt.nn.GELU) == constructor_parameters(torch.nn.GELU)
    assert repr(memopt.nn.GELU()) == repr(torch.nn.GELU())
    assert repr(memopt.nn.GELU("tanh")) == repr(torch.nn.GELU("tanh"))
    assert isinstance(memopt.nn.GELU(), torch.nn.GELU)


@every_form
def test_gelu_runs_the_op(approximate: str, device: torch.device) -> None:
    module = memopt.nn.GELU(approximate)
    x = torch.randn(3, 7, device=device)
    with RecordOps() as ops:
        output = module(x)
    assert ops.ops == [torch.ops.memopt._activation_forward.default]
    assert torch.equal(output, memopt.functional.gelu(x, approximate=approximate))


@every_form
def test_gelu_state_and_copies(approximate: str, device: torch.device) -> None:
    module, twin = memopt.nn.GELU(approximate), torch.nn.GELU(approximate)
    x = torch.randn(3, 7, device=device)
    assert_same_state(module, twin, x)
    assert_copies(module, x)


def test_bad_approximate_is_named() -> None:
    with pytest.raises(RuntimeError, match="gelu: approximate must be 'none' or 'tanh', got 'erf'"):
        memopt.nn.GELU("erf")(torch.zeros(1))


NAMES = {
    "SiLU": "silu",
    "ReLU": "relu",
    "Sigmoid": "sigmoid",
    "QuickGELU": "quick_gelu",
    "ReLUSquared": "relu_squared",
    "ReLU6": "relu6",
    "LeakyReLU": "leaky_relu",
    "ELU": "elu",
    "Hardsigmoid": "hardsigmoid",
    "Hardswish": "hardswish",
    "Mish": "mish",
}
OF_PYTORCH = [name for name in NAMES if hasattr(torch.nn, name)]
of_pytorch = pytest.mark.parametrize("name", OF_PYTORCH)


@of_pytorch
def test_constructor_and_repr(name: str) -> None:
    ours, torchs = getattr(memopt.nn, name), getattr(torch.nn, name)
    assert constructor_parameters(ours) == constructor_parameters(torchs)
    assert repr(ours()) == repr(torchs())
    assert isinstance(ours(), torchs)


@pytest.mark.parametrize(("name", "op"), NAMES.items())
def test_runs_the_op(name: str, op: str, device: torch.device) -> None:
    module, x = getattr(memopt.nn, name)(), torch.randn(3, 7, device=device)
    with RecordOps() as ops:
        output = module(x)
    (arguments,) = ops.arguments_of(torch.ops.memopt._activation_forward.default)
    assert arguments["activation"] == op
    assert torch.equal(output, getattr(memopt.functional, op)(x))
    assert_copies(module, x)


@of_pytorch
def test_state_and_copies(name: str, device: torch.device) -> None:
    module, twin = getattr(memopt.nn, name)(), getattr(torch.nn, name)()
    assert_same_state(module, twin, torch.randn(3, 7, device=device))


@pytest.mark.parametrize("name", [n for n in OF_PYTORCH if n != "Sigmoid"])
def test_in_place_the_input_is_written_over(name: str, device: torch.device) -> None:
    module, x = getattr(memopt.nn, name)(inplace=True), torch.randn(3, 7, device=device)
    expected = getattr(torch.nn, name)()(x)
    assert module(x) is x
    torch.testing.assert_close(x, expected)
    assert repr(module) == repr(getattr(torch.nn, name)(inplace=True))
