"""A norm with the linear or the linears behind it, as one module: the norm's output is not kept.

The module holds torch.nn's own, whose parameters it reads: their forward does not run, nor do hooks
on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from memopt import functional
from memopt.functional.arguments import names_arguments
from memopt.nn.linear import around, check_features, check_kinds

NormLinearT = TypeVar("NormLinearT", bound="_NormLinear")


class _NormLinear(nn.Module):
    """A norm, and behind it one linear or several that share its output."""

    kind: ClassVar[type[nn.Module]]
    """The class of the norm."""

    @names_arguments
    def __init__(
        self,
        norm: nn.Module,
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool,
        device: Any,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.norm = norm
        if isinstance(out_features, int):
            self.linear = nn.Linear(in_features, out_features, bias, device, dtype)
        else:
            self.linears = nn.ModuleList(
                nn.Linear(in_features, out, bias, device, dtype) for out in out_features
            )

    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, ...]:
        behind = self._behind()
        outputs = self._run(input, [one.weight for one in behind], [one.bias for one in behind])
        return outputs if hasattr(self, "linears") else outputs[0]

    def _run(
        self, input: Tensor, weights: list[Tensor], biases: list[Tensor | None]
    ) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def _behind(self) -> list[Any]:
        return list(self.linears) if hasattr(self, "linears") else [self.linear]

    @classmethod
    def from_modules(
        cls: type[NormLinearT], norm: Any, linear: nn.Linear, *more: nn.Linear
    ) -> NormLinearT:
        """A module on the very parameters of these, which must fit together."""
        linears = (linear, *more)
        for one in linears:
            check_kinds(cls.__name__, norm, cls.kind, one)
            check_features(cls.__name__, norm.normalized_shape, one)
        if len(linears) == 1:
            return around(cls, linears[0].training, norm=norm, linear=linears[0])
        return around(cls, linears[0].training, norm=norm, linears=nn.ModuleList(linears))

    def to_modules(self) -> tuple[Any, ...]:
        """The norm, then the Linear or Linears, that it is made of; the same parameters."""
        return self.norm, *self._behind()


class LayerNormLinear(_NormLinear):
    """Linear(LayerNorm(x)) by memopt.functional.layer_norm_linear: saves its input and 8 bytes a
    row. With several linears (separate query, key and value, say), which share the norm's output,
    the result is a tuple.

    state_dict keys: norm.weight, norm.bias, linear.weight, linear.bias: those of a LayerNorm and a
    Linear under the names norm and linear. Several linears are linears.0, linears.1, and so on.

    Args:
        in_features, out_features: of the linear; the norm is over in_features. A sequence of
            out_features makes several linears.
        bias: of the linears. Default True.
        eps: of the norm. Default 1e-5.
        elementwise_affine, norm_bias: whether the norm has a weight, and a bias. Default True.
        device, dtype: of all parameters.

    Shape: (*, in_features) to (*, out_features), or to a tuple of such.
    """

    kind = nn.LayerNorm
    norm: nn.LayerNorm

    @names_arguments
    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool = True,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        norm_bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        norm = nn.LayerNorm(in_features, eps, elementwise_affine, norm_bias, device, dtype)
        super().__init__(norm, in_features, out_features, bias, device, dtype)

    def _run(
        self, input: Tensor, weights: list[Tensor], biases: list[Tensor | None]
    ) -> tuple[Tensor, ...]:
        norm = self.norm
        return functional.layer_norm_linear(
            input, norm.weight, norm.bias, weights, biases, norm.eps
        )


class RMSNormLinear(_NormLinear):
    """Linear(RMSNorm(x)) by memopt.functional.rms_norm_linear. Saves its input and 4 bytes a row.
    Several linears as in LayerNormLinear.

    state_dict keys: norm.weight, linear.weight, linear.bias, or linears.0.weight and so on.

    Args:
        in_features, out_features, bias: as for LayerNormLinear.
        eps: of the norm. Default None: the machine epsilon, as torch.nn.RMSNorm's.
        elementwise_affine: whether the norm has a weight. Default True.
        device, dtype: of all parameters.

    Shape: (*, in_features) to (*, out_features), or to a tuple of such.
    """

    kind = nn.RMSNorm
    norm: nn.RMSNorm

    @names_arguments
    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool = True,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        norm = nn.RMSNorm(in_features, eps, elementwise_affine, device, dtype)
        super().__init__(norm, in_features, out_features, bias, device, dtype)

    def _run(
        self, input: Tensor, weights: list[Tensor], biases: list[Tensor | None]
    ) -> tuple[Tensor, ...]:
        norm = self.norm
        # memopt.nn.RMSNorm's, if from_modules was given one.
        zero_centered = getattr(norm, "zero_centered_weight", False)
        return functional.rms_norm_linear(
            input, norm.weight, weights, biases, norm.eps, zero_centered_weight=zero_centered
        )
