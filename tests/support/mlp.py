"""Kinds of MLP, as data: mlp on them, and the ops that it stands for one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memopt.functional as M
from tests.support.seed import seed

LEVELS = ("none", "activations", "all")
every_level = pytest.mark.parametrize("recompute", LEVELS)
FEATURES, HIDDEN = 24, 40


@dataclass(frozen=True)
class Variant:
    name: str
    norm: str = "none"
    gated: bool = False
    activation: str = "gelu"
    bias: bool = True
    activation_dropout: float = 0.0
    dropout: float = 0.0
    residual: bool = False
    zero_centered_weight: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def first(self) -> int:
        """Linears in front of the activation."""
        return 2 if self.gated else 1

    def options(self) -> dict[str, Any]:
        return {
            "norm": self.norm,
            "activation": self.activation,
            "activation_dropout": self.activation_dropout,
            "dropout": self.dropout,
            "residual": self.residual,
            "zero_centered_weight": self.zero_centered_weight,
        }


VARIANTS = (
    Variant("plain"),
    Variant("GPT-2", norm="layer_norm", activation="gelu_tanh", residual=True),
    Variant("GPT-2 with dropout", norm="layer_norm", dropout=0.1, residual=True),
    Variant("Llama", norm="rms_norm", gated=True, activation="silu", bias=False, residual=True),
    Variant("Gemma", "rms_norm", True, "gelu_tanh", bias=False, zero_centered_weight=True),
    Variant("T5", "rms_norm", False, "relu", bias=False, activation_dropout=0.1, dropout=0.1),
    Variant("gated T5", "rms_norm", True, "gelu_tanh", False, 0.1, 0.1, residual=True),
    Variant("BERT", activation_dropout=0.2, residual=True),
    Variant("gated without norm", gated=True, activation="relu_squared", residual=True),
)
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)


def make_tensors(
    variant: Variant, device: torch.device, dtype: torch.dtype, leading: tuple[int, ...] = (6,)
) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"input": (*leading, FEATURES)}
    for name in ("gate", "up") if variant.gated else ("up",):
        shapes[f"{name}_weight"] = (HIDDEN, FEATURES)
        if variant.bias:
            shapes[f"{name}_bias"] = (HIDDEN,)
    shapes["down_weight"] = (FEATURES, HIDDEN)
    if variant.bias:
        shapes["down_bias"] = (FEATURES,)
    if variant.norm != "none":
        shapes["norm_weight"] = (FEATURES,)
    if variant.norm == "layer_norm":
        shapes["norm_bias"] = (FEATURES,)
    seed(3)
    return {
        name: (torch.randn(shape) / 2).to(device, dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def fused(variant: Variant, tensors: dict[str, Tensor], recompute: str = "activations") -> Tensor:
    seed(5)
    return M.mlp(
        **{"up_bias": None, **tensors, **variant.options()},  # type: ignore[arg-type]
        recompute=recompute,
    )


def apart(variant: Variant, tensors: dict[str, Tensor]) -> Tensor:
    """The ops one after another."""
    seed(5)
    x = n = tensors["input"]
    norm_weight = tensors.get("norm_weight")
    if variant.norm == "layer_norm":
        n = M.layer_norm(x, x.shape[-1:], norm_weight, tensors.get("norm_bias"))
    elif variant.norm == "rms_norm":
        zero_centered = variant.zero_centered_weight
        n = M.rms_norm(x, x.shape[-1:], norm_weight, zero_centered_weight=zero_centered)
    linears = {
        name: F.linear(n, tensors[f"{name}_weight"], tensors.get(f"{name}_bias"))
        for name in (("gate", "up") if variant.gated else ("up",))
    }
    p = variant.activation_dropout
    if variant.gated:
        a = M.dropout(M.gated(linears["gate"], linears["up"], variant.activation), p)
    else:
        a = M.activation_dropout(linears["up"], p, activation=variant.activation)
    y = M.dropout(F.linear(a, tensors["down_weight"], tensors.get("down_bias")), variant.dropout)
    return y + x if variant.residual else y


def gradients(
    y: Tensor, tensors: dict[str, Tensor], create_graph: bool = False
) -> dict[str, Tensor]:
    seed(1)
    wanted = {name: t for name, t in tensors.items() if t.requires_grad}
    grads = torch.autograd.grad(
        y, list(wanted.values()), torch.randn_like(y), create_graph=create_graph
    )
    return dict(zip(wanted, grads, strict=True))
