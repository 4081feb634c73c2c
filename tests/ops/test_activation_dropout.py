"""Proves what is particular to activation_dropout and gelu_dropout: they drop what dropout drops,
in every type and for every activation; what is kept is the activation, scaled before it is rounded;
p = 0 and eval are the activation, p = 1 multiplies it by 0; a state that is given is applied.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import memopt
from memopt.functional import activation_dropout, gelu_dropout
from tests.support.cases.activation import THROUGHOUT, VALUES_ONLY, named
from tests.support.philox import keep_mask, scaled
from tests.support.record_ops import RecordOps
from tests.support.shapes import COLS, random_normal
from tests.support.tolerances import is_short_in_bfloat16

ops = torch.ops.memopt
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_activation = pytest.mark.parametrize("name", THROUGHOUT)


def normal(*size: int, dtype: torch.dtype = torch.float32, device: object = "cpu") -> Tensor:
    return random_normal(*size).to(device=device, dtype=dtype)


def forward(x: Tensor, p: float, name: str, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return ops._activation_dropout_forward(x, state, p, **named(name))


def activation_gradient(grad: Tensor, x: Tensor, name: str) -> Tensor:
    return ops._activation_backward(grad, x, **named(name))[0]


@pytest.mark.parametrize(
    ("name", "dtype", "size", "p"),
    [
        *itertools.product(
            THROUGHOUT, [torch.float32, torch.float64], [*COLS, 512, 70000], [0.1, 0.5]
        ),
        *((name, torch.float32, 769, 0.1) for name in VALUES_ONLY),
    ],
    ids=str,
)
def test_the_activation_and_its_gradient_times_dropouts_mask(
    name: str, dtype: torch.dtype, size: int, p: float, device: torch.device
) -> None:
    """In bits, where the two ops round to the type that they compute in."""
    x, grad = normal(size, dtype=dtype, device=device), normal(size, dtype=dtype, device=device)
    grad = grad.cos()
    output, state = forward(x, p, name)
    keep = keep_mask(state, size, p)
    value = ops._activation_forward(x, **named(name))
    assert torch.equal(output, scaled(value, keep, p))
    dx, again = ops._activation_dropout_backward(
        grad, x, state, p, **named(name), recompute_output=True
    )
    assert torch.equal(dx, activation_gradient(scaled(grad, keep, p), x, name))
    assert torch.equal(again, output)


@every_activation
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_nothing_is_rounded_between_the_activation_and_the_mask(
    name: str, dtype: torch.dtype, p: float, device: torch.device
) -> None:
    """The 16-bit results are float32's, rounded. (Those that a CPU computes for bfloat16 alone may
    round to the other neighbour, where the middle between two is as near as 2^-13.)
    """
    x, grad = normal(4099, dtype=dtype, device=device), normal(4099, dtype=dtype, device=device)
    output, state = forward(x, p, name)
    wide, _ = forward(x.float(), p, name, state)
    dx, _ = ops._activation_dropout_backward(grad, x, state, p, **named(name))
    wide_dx, _ = ops._activation_dropout_backward(grad.float(), x.float(), state, p, **named(name))
    is_short = is_short_in_bfloat16(name) and dtype == torch.bfloat16 and device.type == "cpu"
    has_short_derivative = is_short and name not in ("gelu", "gelu_tanh")
    for short, narrow, exact in (
        (is_short, output, wide),
        (has_short_derivative, dx, wide_dx),
    ):
        if not short:
            assert torch.equal(narrow, exact.to(dtype))
            continue
        apart = narrow != exact.to(dtype)
        assert apart.double().mean() < 0.02
        nearest = 2.0**-8 * (1 + 2.0**-4)  # half the distance to a neighbour
        assert (narrow.float() - exact).abs()[apart].le(nearest * exact.abs()[apart]).all()


@every_dtype
def test_drops_what_dropout_drops_under_the_same_seed(
    dtype: torch.dtype, device: torch.device
) -> None:
    x = 1 + normal(3000, dtype=dtype, device=device).abs()
    torch.manual_seed(3)
    expected = memopt.functional.dropout(x, 0.3) == 0
    torch.manual_seed(3)
    assert torch.equal(gelu_dropout(x, 0.3) == 0, expected)


@every_activation
@every_dtype
def test_p_of_zero_and_eval_are_the_activation(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Its op itself, and nothing is drawn; the op with p = 0 has its bits."""
    x = normal(6, 130, dtype=dtype, device=device)
    expected = ops._activation_forward(x, **named(name))
    before = torch.get_rng_state()
    for p, training in ((0.0, True), (0.5, False), (1.0, False)):
        with RecordOps() as record:
            output = activation_dropout(x, p, training, **named(name))
        assert torch.equal(output, expected)
        assert record.ops == [ops._activation_forward.default]
        assert activation_dropout(x.T, p, training, **named(name)).stride() == x.T.stride()
    assert torch.equal(torch.get_rng_state(), before)
    output, state = forward(x, 0.0, name)
    assert torch.equal(output, expected)
    grad = x.cos()
    dx, _ = ops._activation_dropout_backward(grad, x, state, 0.0, **named(name))
    assert torch.equal(dx, activation_gradient(grad, x, name))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_dropout_is_activation_dropout_of_gelu(approximate: str, device: torch.device) -> None:
    x = normal(6, 130, device=device)
    name = "gelu_tanh" if approximate == "tanh" else "gelu"
    torch.manual_seed(0)
    expected = activation_dropout(x, 0.3, **named(name))
    torch.manual_seed(0)
    assert torch.equal(gelu_dropout(x, 0.3, approximate=approximate), expected)
    for p, training in ((0.0, True), (0.3, False)):
        expected = memopt.functional.gelu(x, approximate)
        assert torch.equal(gelu_dropout(x, p, training, approximate), expected)


@every_activation
@every_dtype
def test_p_of_one_multiplies_by_zero(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """NaN and infinite values of the activation become NaN, as in PyTorch."""
    values = [1.0, -1.0, 0.0, math.inf, -math.inf, math.nan]
    x = torch.tensor(values, dtype=dtype, device=device)
    expected = 0 * ops._activation_forward(x, **named(name))
    output = activation_dropout(x, 1.0, **named(name))
    torch.testing.assert_close(output, expected, rtol=0, atol=0, equal_nan=True)
    leaf = normal(1000, dtype=dtype, device=device).requires_grad_()
    activation_dropout(leaf, 1.0, **named(name)).sum().backward()
    assert not leaf.grad.any()


@every_dtype
def test_a_state_that_is_given_is_applied_and_none_returned(
    dtype: torch.dtype, device: torch.device
) -> None:
    x = normal(1003, dtype=dtype, device=device)
    output, state = forward(x, 0.3, "gelu")
    before = torch.get_rng_state()
    again, none = forward(x, 0.3, "gelu", state)
    assert none is None
    assert torch.equal(again, output)
    assert torch.equal(torch.get_rng_state(), before)
    strided = torch.stack([state, state], dim=1)[:, 0]
    assert torch.equal(forward(x, 0.3, "gelu", strided)[0], output)


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan, math.inf])
@pytest.mark.parametrize("training", [True, False])
def test_bad_p_is_named(p: float, training: bool, device: torch.device) -> None:
    x = torch.zeros(3, device=device)
    state = torch.zeros(2, dtype=torch.int64, device=device)
    message = "dropout: p must be between 0 and 1, got " + ("nan" if p != p else str(p))
    with pytest.raises(ValueError, match=f"activation_{message}"):
        activation_dropout(x, p, training)
    with pytest.raises(ValueError, match=f"gelu_{message}"):
        gelu_dropout(x, p, training)
    for call in (
        lambda: ops.activation_dropout(x, p, activation="gelu"),
        lambda: forward(x, p, "gelu"),
        lambda: forward(x, p, "gelu", state),
    ):
        with pytest.raises(ValueError, match="activation_dropout: p must be between 0 and 1, got"):
            call()
    with pytest.raises(ValueError, match="activation_dropout backward: p must be between"):
        ops._activation_dropout_backward(x, x, state, p, activation="gelu")


def test_bad_activation_is_named(device: torch.device) -> None:
    x = torch.zeros(3, device=device)
    message = "activation_dropout: activation must be one of 'gelu', .*, got 'tanh'"
    for p, training in ((0.5, True), (0.5, False), (0.0, True)):
        with pytest.raises(RuntimeError, match=message):
            activation_dropout(x, p, training, "tanh")
        with pytest.raises(RuntimeError, match="approximate must be 'none' or 'tanh', got 'erf'"):
            gelu_dropout(x, p, training, "erf")
    with pytest.raises(RuntimeError, match=message):
        forward(x, 0.5, "tanh")


def test_bad_state_is_named(device: torch.device) -> None:
    x = torch.zeros(3, device=device)
    rule = r"rng_state must be an int64 tensor \[seed, offset\]"
    for state in (torch.zeros(2), torch.zeros(3, dtype=torch.int64), torch.zeros(2, 2).long()):
        with pytest.raises(RuntimeError, match=f"activation_dropout: {rule}"):
            forward(x, 0.5, "gelu", state.to(device))
        with pytest.raises(RuntimeError, match=f"activation_dropout backward: {rule}"):
            ops._activation_dropout_backward(x, x, state.to(device), 0.5, activation="gelu")
    elsewhere = torch.zeros(2, dtype=torch.int64, device="meta")
    with pytest.raises(RuntimeError, match="rng_state must be on input's device"):
        forward(x, 0.5, "gelu", elsewhere)
    with pytest.raises(RuntimeError, match="rng_state must be on input's device"):
        ops._activation_dropout_backward(x, x, elsewhere, 0.5, activation="gelu")
