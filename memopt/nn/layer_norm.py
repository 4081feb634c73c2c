"""LayerNorm as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt import functional


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm on memopt.functional.layer_norm: saves its input and 8 bytes a row for
    backward.

    Parameters may be float32 with a float16 or bfloat16 input, on every device. state_dict keys:
    weight, bias.

    Args:
        normalized_shape: an int for the last dimension, or the last dimensions.
        eps: added to the variance. Default 1e-5.
        elementwise_affine: whether there are weight and bias at all. Default True.
        bias: whether there is a bias; no effect without elementwise_affine. Default True.
        device, dtype: of the parameters.

    Shape: (*, *normalized_shape) to the same.
    """

    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
