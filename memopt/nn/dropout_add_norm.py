"""Dropout and a residual in front of a norm, as modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memopt import functional
from memopt.functional.arguments import names_arguments
from memopt.nn.rms_norm import RMSNorm


class DropoutAddLayerNorm(torch.nn.LayerNorm):
    """(LayerNorm(s), s) with s = dropout(input) + residual, by
    memopt.functional.dropout_add_layer_norm: saves the sum, 8 bytes a row and 16 bytes a call for
    backward.

    eval() makes it AddLayerNorm. state_dict keys: weight, bias, as torch.nn.LayerNorm's, so the
    state of the norm that follows dropout and an addition loads into it.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as for LayerNorm.
        p: the probability of zeroing an element of input; keyword only. Default 0.5.

    Shape: two tensors (*, *normalized_shape) to two of the same: the normalised sum, and the sum.
    """

    @names_arguments
    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        p: float = 0.5,
    ) -> None:
        _check_p("DropoutAddLayerNorm", p)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.p = p

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return functional.dropout_add_layer_norm(
            input,
            residual,
            self.p,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            self.training,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}"


class DropoutAddRMSNorm(RMSNorm):
    """(RMSNorm(s), s) with s = dropout(input) + residual, by
    memopt.functional.dropout_add_rms_norm: saves the sum, 4 bytes a row and 16 bytes a call for
    backward.

    eval() makes it AddRMSNorm. state_dict key: weight, as torch.nn.RMSNorm's.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype, zero_centered_weight: as for
            RMSNorm.
        p: the probability of zeroing an element of input; keyword only. Default 0.5.

    Shape: two tensors (*, *normalized_shape) to two of the same: the normalised sum, and the sum.
    """

    @names_arguments
    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        p: float = 0.5,
        zero_centered_weight: bool = False,
    ) -> None:
        _check_p("DropoutAddRMSNorm", p)
        super().__init__(
            normalized_shape,
            eps,
            elementwise_affine,
            device,
            dtype,
            zero_centered_weight=zero_centered_weight,
        )
        self.p = p

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return functional.dropout_add_rms_norm(
            input,
            residual,
            self.p,
            self.normalized_shape,
            self.weight,
            self.eps,
            self.training,
            zero_centered_weight=self.zero_centered_weight,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}"


def _check_p(module: str, p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{module}: p must be between 0 and 1, got {p}")
