"""Proves: mlp raises an error for what breaks a rule, with the argument, the rule and the value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import memopt.functional as M

X, UP, DOWN = torch.randn(2, 4), torch.randn(6, 4), torch.randn(4, 6)
BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "level": (
        lambda: M.mlp(X, UP, None, DOWN, recompute="some"),
        RuntimeError,
        "mlp: recompute must be 'none', 'activations' or 'all', got 'some'",
    ),
    "activation": (
        lambda: M.mlp(X, UP, None, DOWN, activation="tanh"),
        RuntimeError,
        "mlp: activation must be one of 'gelu', .*got 'tanh'",
    ),
    "norm": (
        lambda: M.mlp(X, UP, None, DOWN, norm="batch"),
        RuntimeError,
        "mlp: norm must be 'none', 'layer_norm' or 'rms_norm', got 'batch'",
    ),
    "norm size": (
        lambda: M.mlp(X, UP, None, DOWN, norm="layer_norm", norm_weight=torch.ones(3)),
        RuntimeError,
        r"mlp: norm_weight must have shape \[4\]",
    ),
    "norm parameters without a norm": (
        lambda: M.mlp(X, UP, None, DOWN, norm_weight=torch.ones(4)),
        RuntimeError,
        "must be None where norm is 'none'",
    ),
    "norm bias": (
        lambda: M.mlp(X, UP, None, DOWN, norm="rms_norm", norm_bias=torch.ones(4)),
        RuntimeError,
        "norm_bias must be None where norm is 'rms_norm'",
    ),
    "up features": (
        lambda: M.mlp(X, torch.randn(6, 5), None, DOWN),
        RuntimeError,
        r"mlp: up_weight must have shape \[out, 4\]",
    ),
    "gate rows": (
        lambda: M.mlp(X, UP, None, DOWN, gate_weight=torch.randn(5, 4)),
        RuntimeError,
        "mlp: gate_weight must have up_weight's 6 rows, got 5",
    ),
    "gate bias alone": (
        lambda: M.mlp(X, UP, None, DOWN, gate_bias=torch.zeros(6)),
        RuntimeError,
        "gate_bias must be None without gate_weight",
    ),
    "down features": (
        lambda: M.mlp(X, UP, None, torch.randn(4, 5)),
        RuntimeError,
        r"mlp: down_weight must have shape \[out, 6\]",
    ),
    "several dtypes": (
        lambda: M.mlp(X, UP, None, DOWN.double()),
        RuntimeError,
        "mlp: down_weight must have input's dtype",
    ),
    "bias": (
        lambda: M.mlp(X, UP, torch.zeros(4), DOWN),
        RuntimeError,
        r"mlp: up_bias must have shape \[6\]",
    ),
    "residual": (
        lambda: M.mlp(X, UP, None, torch.randn(3, 6), residual=True),
        RuntimeError,
        "mlp: down_weight must have input's 4 features as rows where residual is added, got 3",
    ),
    "dropout": (
        lambda: M.mlp(X, UP, None, DOWN, dropout=1.5),
        ValueError,
        "mlp: dropout must be between 0 and 1, got 1.5",
    ),
    "activation dropout": (
        lambda: torch.ops.memopt.mlp(X, UP, None, DOWN, None, activation_dropout=float("nan")),
        ValueError,
        "mlp: activation_dropout must be between 0 and 1, got nan",
    ),
    "scalar": (
        lambda: M.mlp(torch.tensor(1.0), UP, None, DOWN),
        RuntimeError,
        "mlp: input must have at least one dimension",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    call, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        call()
