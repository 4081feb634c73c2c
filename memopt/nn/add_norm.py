"""A residual added in front of a norm, as modules."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt import functional
from memopt.nn.rms_norm import RMSNorm


class AddLayerNorm(torch.nn.LayerNorm):
    """(LayerNorm(input + residual), input + residual) by memopt.functional.add_layer_norm: saves
    the sum and 8 bytes a row for backward.

    state_dict keys: weight, bias, as torch.nn.LayerNorm's, so the state of the norm that follows an
    addition loads into it.

    Args: as for LayerNorm.

    Shape: two tensors (*, *normalized_shape) to two of the same: the normalised sum, and the sum.
    """

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return functional.add_layer_norm(
            input, residual, self.normalized_shape, self.weight, self.bias, self.eps
        )


class AddRMSNorm(RMSNorm):
    """(RMSNorm(input + residual), input + residual) by memopt.functional.add_rms_norm: saves the
    sum and 4 bytes a row for backward.

    state_dict key: weight, as torch.nn.RMSNorm's.

    Args: as for RMSNorm.

    Shape: two tensors (*, *normalized_shape) to two of the same: the normalised sum, and the sum.
    """

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return functional.add_rms_norm(
            input,
            residual,
            self.normalized_shape,
            self.weight,
            self.eps,
            zero_centered_weight=self.zero_centered_weight,
        )
