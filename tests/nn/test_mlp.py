"""Proves: MLP computes what its modules do one after another, on the same parameters and under the
same keys, at every level of recomputation; it can be made of modules and taken apart into them.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt.nn as mnn

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "GPT-2": {"norm": "layer_norm", "activation": "gelu_tanh", "residual": True},
    "Llama": {"norm": "rms_norm", "gated": True, "activation": "silu", "bias": False},
    "eps": {"norm": "layer_norm", "eps": 1e-2},
    "out": {"out_features": 5},
}
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def by_modules(mlp: mnn.MLP, x: Tensor) -> Tensor:
    n = x if mlp.norm is None else mlp.norm(x)
    f = ACTIVATIONS[mlp.activation]
    a = f(mlp.up(n)) if mlp.gate is None else f(mlp.gate(n)) * mlp.up(n)
    y: Tensor = mlp.down(a)
    return y + x if mlp.residual else y


@pytest.mark.parametrize("recompute", ["none", "activations", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_computes_what_its_modules_do(kind: str, recompute: str) -> None:
    mlp = mnn.MLP(6, 10, recompute=recompute, **KINDS[kind])
    x = torch.randn(3, 6, requires_grad=True)
    actual, expected = mlp(x), by_modules(mlp, x)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    tensors = [x, *mlp.parameters()]
    for a, e in zip(
        torch.autograd.grad(actual.square().sum(), tensors),
        torch.autograd.grad(expected.square().sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_is_made_of_modules_and_taken_apart(kind: str) -> None:
    mlp = mnn.MLP(6, 10, **KINDS[kind])
    parts = mlp.to_modules()
    assert {f"{name}.{key}" for name, part in parts.items() for key in part.state_dict()} == set(
        mlp.state_dict()
    )
    twin = mnn.MLP.from_modules(
        **parts, activation=mlp.activation, residual=mlp.residual, recompute="all"
    )
    assert all(a is b for a, b in zip(mlp.parameters(), twin.parameters(), strict=True))
    x = torch.randn(2, 6)
    assert torch.equal(mlp(x), twin(x))


def test_keys_copies_and_repr() -> None:
    mlp = mnn.MLP(6, 10, gated=True, norm="rms_norm", bias=False, dropout=0.1)
    assert list(mlp.state_dict()) == ["norm.weight", "gate.weight", "up.weight", "down.weight"]
    x = torch.randn(2, 6)
    for twin in (copy.deepcopy(mlp), pickle.loads(pickle.dumps(mlp))):
        assert torch.equal(twin.eval()(x), mlp.eval()(x))
    assert "recompute='activations'" in repr(mlp)
    loaded = mnn.MLP(6, 10, gated=True, norm="rms_norm", bias=False, dtype=torch.float64)
    assert loaded.up.weight.dtype == loaded.norm.weight.dtype == torch.float64


def test_a_zero_centred_norm_stays_one() -> None:
    norm = mnn.RMSNorm(6, zero_centered_weight=True)
    mlp = mnn.MLP.from_modules(nn.Linear(6, 10), nn.Linear(10, 6), norm=norm)
    x = torch.randn(2, 6)
    torch.testing.assert_close(mlp(x), by_modules(mlp, x), rtol=1e-5, atol=1e-6)


def test_dropouts_only_in_training() -> None:
    torch.manual_seed(0)
    mlp = mnn.MLP(6, 64, activation_dropout=0.5, dropout=0.5)
    x = torch.randn(4, 6)
    assert (mlp(x) == 0).any()
    torch.testing.assert_close(mlp.eval()(x), by_modules(mlp, x), rtol=1e-5, atol=1e-6)


def test_bad_arguments() -> None:
    linear = nn.Linear(6, 10)
    with pytest.raises(ValueError, match=r"MLP: norm must be 'none', .*got 'batch'"):
        mnn.MLP(6, 10, norm="batch")
    with pytest.raises(ValueError, match=r"MLP: recompute must be 'none', .*got 'half'"):
        mnn.MLP(6, 10, recompute="half")
    with pytest.raises(ValueError, match="MLP: dropout must be between 0 and 1, got -1"):
        mnn.MLP(6, 10, dropout=-1)
    with pytest.raises(RuntimeError, match=r"activation must be one of 'gelu', .*got 'tanh'"):
        mnn.MLP(6, 10, activation="tanh")(torch.randn(2, 6))
    with pytest.raises(TypeError, match="up must be a Linear, got GELU"):
        mnn.MLP.from_modules(nn.GELU(), linear)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"down must have up's 10 features .*got 6"):
        mnn.MLP.from_modules(linear, linear)
    with pytest.raises(ValueError, match=r"gate must have up's shape \(10, 6\), got \(6, 10\)"):
        mnn.MLP.from_modules(linear, nn.Linear(10, 6), gate=nn.Linear(10, 6))
    with pytest.raises(TypeError, match="norm must be a LayerNorm or an RMSNorm, got GELU"):
        mnn.MLP.from_modules(linear, nn.Linear(10, 6), norm=nn.GELU())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="norm must be over up's 6 features, got"):
        mnn.MLP.from_modules(linear, nn.Linear(10, 6), norm=nn.LayerNorm(5))
