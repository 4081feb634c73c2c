"""LayerNorm followed by GELU as one module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memopt import functional
from memopt.functional.arguments import names_arguments


class LayerNormGELU(torch.nn.LayerNorm):
    """GELU(LayerNorm(x)) by memopt.functional.layer_norm_gelu: saves its input and 8 bytes a row
    for backward.

    state_dict keys: weight, bias, as torch.nn.LayerNorm's, so the state of the LayerNorm in
    Sequential(LayerNorm(...), GELU(...)) loads into it.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as for LayerNorm.
        approximate: "none" (default) or "tanh", keyword only.

    Shape: (*, *normalized_shape) to the same.
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
        approximate: str = "none",
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.approximate = approximate

    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm_gelu(
            input, self.normalized_shape, self.weight, self.bias, self.eps, self.approximate
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, approximate={self.approximate!r}"
