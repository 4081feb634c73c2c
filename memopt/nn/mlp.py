"""A transformer's MLP as one module, with a choice of what backward recomputes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memopt import functional
from memopt.functional.arguments import names_arguments
from memopt.nn.activation import described
from memopt.nn.linear import around, has_forward_of

RECOMPUTE = ("none", "activations", "all")


class MLP(nn.Module):
    """norm, linear (or a gate's and an up's), activation, linear: memopt.functional.mlp.

    state_dict keys: norm.*, gate.*, up.*, down.*: those of the norm and the linears under these
    names, of those that it has.

    Args:
        in_features, hidden_features: of the first linears.
        out_features: of the second. Default None: in_features.
        bias: of all linears. Default True.
        activation, activation_scalar: as for memopt.nn.Activation. Default "gelu".
        gated: whether there is a gate: f(gate(x)) up(x) for f(up(x)). Default False.
        norm: "none" (default), "layer_norm" or "rms_norm": in front.
        eps: of the norm. Default None: 1e-5 for layer_norm, the machine epsilon for rms_norm.
        activation_dropout, dropout: the probability of zeroing an element behind the activation,
            and behind the second linear, in training. Default 0.
        residual: whether the input is added at the end. Default False.
        recompute: what backward recomputes: "none", "activations" (default) or "all"; see
            memopt.functional.mlp for the bytes.
        device, dtype: of all parameters.

    Shape: (*, in_features) to (*, out_features).
    """

    @names_arguments
    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        activation: str = "gelu",
        gated: bool = False,
        norm: str = "none",
        eps: float | None = None,
        activation_dropout: float = 0.0,
        dropout: float = 0.0,
        residual: bool = False,
        recompute: str = "activations",
        device: Any = None,
        dtype: torch.dtype | None = None,
        activation_scalar: float | None = None,
    ) -> None:
        if norm not in ("none", "layer_norm", "rms_norm"):
            raise ValueError(f"MLP: norm must be 'none', 'layer_norm' or 'rms_norm', got {norm!r}")
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.norm: nn.LayerNorm | nn.RMSNorm | None = None
        if norm == "layer_norm":
            self.norm = nn.LayerNorm(in_features, 1e-5 if eps is None else eps, **factory)
        elif norm == "rms_norm":
            self.norm = nn.RMSNorm(in_features, eps, **factory)
        self.gate = nn.Linear(in_features, hidden_features, bias, **factory) if gated else None
        self.up = nn.Linear(in_features, hidden_features, bias, **factory)
        out_features = in_features if out_features is None else out_features
        self.down = nn.Linear(hidden_features, out_features, bias, **factory)
        self._set_options(
            activation, activation_scalar, activation_dropout, dropout, residual, recompute
        )

    def _set_options(
        self,
        activation: str,
        activation_scalar: float | None,
        activation_dropout: float,
        dropout: float,
        residual: bool,
        recompute: str,
    ) -> None:
        for name, p in (("activation_dropout", activation_dropout), ("dropout", dropout)):
            if not 0.0 <= p <= 1.0:
                raise ValueError(f"MLP: {name} must be between 0 and 1, got {p}")
        if recompute not in RECOMPUTE:
            raise ValueError(
                f"MLP: recompute must be 'none', 'activations' or 'all', got {recompute!r}"
            )
        self.activation = activation
        self.activation_scalar = activation_scalar
        self.activation_dropout = activation_dropout
        self.dropout = dropout
        self.residual = residual
        self.recompute = recompute

    def forward(self, input: Tensor) -> Tensor:
        norm, gate, up, down = self.norm, self.gate, self.up, self.down
        return functional.mlp(
            input,
            up.weight,
            up.bias,
            down.weight,
            down.bias,
            gate_weight=None if gate is None else gate.weight,
            gate_bias=None if gate is None else gate.bias,
            activation=self.activation,
            norm=_kind(norm),
            norm_weight=None if norm is None else norm.weight,
            norm_bias=getattr(norm, "bias", None),
            eps=None if norm is None else norm.eps,
            # memopt.nn.RMSNorm's, if from_modules was given one.
            zero_centered_weight=getattr(norm, "zero_centered_weight", False),
            activation_dropout=self.activation_dropout,
            dropout=self.dropout,
            training=self.training,
            residual=self.residual,
            recompute=self.recompute,
            activation_scalar=self.activation_scalar,
        )

    def extra_repr(self) -> str:
        return (
            f"{described(self.activation, self.activation_scalar)}, "
            f"activation_dropout={self.activation_dropout}, dropout={self.dropout}, "
            f"residual={self.residual}, recompute={self.recompute!r}"
        )

    @classmethod
    def from_modules(
        cls,
        up: nn.Linear,
        down: nn.Linear,
        *,
        gate: nn.Linear | None = None,
        norm: nn.LayerNorm | nn.RMSNorm | None = None,
        activation: str = "gelu",
        activation_dropout: float = 0.0,
        dropout: float = 0.0,
        residual: bool = False,
        recompute: str = "activations",
        activation_scalar: float | None = None,
    ) -> MLP:
        """A module on the very parameters of these modules, which must fit together."""
        _check(up, down, gate, norm)
        module = around(cls, up.training, norm=norm, gate=gate, up=up, down=down)
        module._set_options(
            activation, activation_scalar, activation_dropout, dropout, residual, recompute
        )
        return module

    def to_modules(self) -> dict[str, nn.Module]:
        """The modules that it is made of, by name: norm, gate, up, down; the same parameters."""
        parts = {"norm": self.norm, "gate": self.gate, "up": self.up, "down": self.down}
        return {name: part for name, part in parts.items() if part is not None}


def _kind(norm: nn.Module | None) -> str:
    if norm is None:
        return "none"
    return "layer_norm" if isinstance(norm, nn.LayerNorm) else "rms_norm"


def _check(up: object, down: object, gate: object, norm: object) -> None:
    linears = {"up": up, "down": down} | ({} if gate is None else {"gate": gate})
    for name, linear in linears.items():
        if not isinstance(linear, nn.Linear) or not has_forward_of(linear, nn.Linear):
            raise TypeError(
                f"MLP.from_modules: {name} must be a Linear, got {type(linear).__name__}"
            )
    features, hidden = up.in_features, up.out_features  # type: ignore[attr-defined]
    if down.in_features != hidden:  # type: ignore[attr-defined]
        raise ValueError(
            f"MLP.from_modules: down must have up's {hidden} features as in_features, "
            f"got {down.in_features}"  # type: ignore[attr-defined]
        )
    if isinstance(gate, nn.Linear) and tuple(gate.weight.shape) != (hidden, features):
        raise ValueError(
            f"MLP.from_modules: gate must have up's shape {(hidden, features)}, "
            f"got {tuple(gate.weight.shape)}"
        )
    if norm is None:
        return
    kinds = [kind for kind in (nn.LayerNorm, nn.RMSNorm) if isinstance(norm, kind)]
    if not kinds or not has_forward_of(norm, kinds[0]):  # type: ignore[arg-type]
        raise TypeError(
            f"MLP.from_modules: norm must be a LayerNorm or an RMSNorm, got {type(norm).__name__}"
        )
    shape = tuple(norm.normalized_shape)  # type: ignore[attr-defined]
    if shape != (features,):
        raise ValueError(
            f"MLP.from_modules: norm must be over up's {features} features, got "
            f"normalized_shape {shape}"
        )
