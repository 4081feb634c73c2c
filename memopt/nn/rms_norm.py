"""RMSNorm as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memopt import functional
from memopt.functional.arguments import names_arguments


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm on memopt.functional.rms_norm: saves its input and 4 bytes a row for
    backward.

    The weight may be float32 with a float16 or bfloat16 input, on every device. state_dict key:
    weight.

    Args:
        normalized_shape: an int for the last dimension, or the last dimensions.
        eps: added to the mean square. Default None: the machine epsilon of the type that is
            computed in.
        elementwise_affine: whether there is a weight at all. Default True.
        device, dtype: of the weight.
        zero_centered_weight: the scale is 1 + weight, and the weight begins at 0, as Gemma's
            RMSNorm has it; keyword only. Default False.

    Shape: (*, *normalized_shape) to the same.
    """

    # Of a module that torch.nn's constructor made and memopt.convert changed.
    zero_centered_weight: bool = False

    @names_arguments
    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_weight: bool = False,
    ) -> None:
        self.zero_centered_weight = zero_centered_weight  # torch's constructor draws the weight
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.elementwise_affine and self.zero_centered_weight:
            torch.nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(
            x,
            self.normalized_shape,
            self.weight,
            self.eps,
            zero_centered_weight=self.zero_centered_weight,
        )

    def extra_repr(self) -> str:
        plain = super().extra_repr()
        return f"{plain}, zero_centered_weight=True" if self.zero_centered_weight else plain
