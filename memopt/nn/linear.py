"""A norm or an activation with the linear behind it, as one module: nothing between is kept."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from memopt import functional

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class LayerNormLinear(nn.Module):
    """Linear(LayerNorm(x)) by memopt.functional.layer_norm_linear: saves its input and 8 bytes a
    row.

    state_dict keys: norm.weight, norm.bias, linear.weight, linear.bias: those of a LayerNorm and a
    Linear under the names norm and linear.

    Args:
        in_features, out_features: of the linear; the norm is over in_features.
        bias: of the linear. Default True.
        eps: of the norm. Default 1e-5.
        elementwise_affine, norm_bias: whether the norm has a weight, and a bias. Default True.
        device, dtype: of all parameters.

    Shape: (*, in_features) to (*, out_features).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        norm_bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(in_features, eps, elementwise_affine, norm_bias, device, dtype)
        self.linear = nn.Linear(in_features, out_features, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm_linear(
            input,
            self.norm.weight,
            self.norm.bias,
            self.linear.weight,
            self.linear.bias,
            self.norm.eps,
        )

    @classmethod
    def from_modules(cls, norm: nn.LayerNorm, linear: nn.Linear) -> LayerNormLinear:
        """A module on the very parameters of these two, which must fit together."""
        _check_kinds("LayerNormLinear", norm, nn.LayerNorm, linear)
        _check_features("LayerNormLinear", norm.normalized_shape, linear)
        return _around(cls, norm=norm, linear=linear)

    def to_modules(self) -> tuple[nn.LayerNorm, nn.Linear]:
        """The LayerNorm and the Linear that it is made of; the same parameters."""
        return self.norm, self.linear


class RMSNormLinear(nn.Module):
    """Linear(RMSNorm(x)) by memopt.functional.rms_norm_linear. Saves its input and 4 bytes a row.

    state_dict keys: norm.weight, linear.weight, linear.bias.

    Args:
        in_features, out_features, bias: as for LayerNormLinear.
        eps: of the norm. Default None: the machine epsilon, as torch.nn.RMSNorm's.
        elementwise_affine: whether the norm has a weight. Default True.
        device, dtype: of all parameters.

    Shape: (*, in_features) to (*, out_features).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(in_features, eps, elementwise_affine, device, dtype)
        self.linear = nn.Linear(in_features, out_features, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        return functional.rms_norm_linear(
            input,
            self.norm.weight,
            self.linear.weight,
            self.linear.bias,
            self.norm.eps,
            # memopt.nn.RMSNorm's, if from_modules was given one.
            zero_centered_weight=getattr(self.norm, "zero_centered_weight", False),
        )

    @classmethod
    def from_modules(cls, norm: nn.RMSNorm, linear: nn.Linear) -> RMSNormLinear:
        """A module on the very parameters of these two, which must fit together."""
        _check_kinds("RMSNormLinear", norm, nn.RMSNorm, linear)
        _check_features("RMSNormLinear", norm.normalized_shape, linear)
        return _around(cls, norm=norm, linear=linear)

    def to_modules(self) -> tuple[nn.RMSNorm, nn.Linear]:
        """The RMSNorm and the Linear that it is made of; the same parameters."""
        return self.norm, self.linear


class GELULinear(nn.Module):
    """Linear(GELU(x)) by memopt.functional.gelu_linear. Saves its input.

    state_dict keys: linear.weight, linear.bias.

    Args:
        in_features, out_features, bias: of the linear.
        approximate: of the GELU, "none" (default) or "tanh".
        device, dtype: of the parameters.

    Shape: (*, in_features) to (*, out_features).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        approximate: str = "none",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.approximate = approximate
        self.linear = nn.Linear(in_features, out_features, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        return functional.gelu_linear(input, self.linear.weight, self.linear.bias, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"

    @classmethod
    def from_modules(cls, activation: nn.GELU, linear: nn.Linear) -> GELULinear:
        """A module on the very parameters of the linear."""
        _check_kinds("GELULinear", activation, nn.GELU, linear)
        return _around(cls, approximate=activation.approximate, linear=linear)

    def to_modules(self) -> tuple[nn.GELU, nn.Linear]:
        """A GELU, and the Linear that it is made of."""
        return nn.GELU(self.approximate), self.linear


def _around(cls: type[ModuleT], **attributes: Any) -> ModuleT:
    """An instance of `cls` that holds these, without new parameters."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    module.train(attributes["linear"].training)
    return module


def _check_kinds(owner: str, first: object, kind: type, linear: object) -> None:
    for module, expected in ((first, kind), (linear, nn.Linear)):
        if not isinstance(module, expected):
            raise TypeError(
                f"{owner}.from_modules: takes a {kind.__name__} and a Linear, got "
                f"{type(module).__name__}"
            )


def _check_features(owner: str, normalized_shape: tuple[int, ...], linear: nn.Linear) -> None:
    if tuple(normalized_shape) != (linear.in_features,):
        raise ValueError(
            f"{owner}.from_modules: the norm must be over the linear's {linear.in_features} "
            f"features, got normalized_shape {tuple(normalized_shape)}"
        )
