"""A head and its loss as one module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memopt import functional
from memopt.functional.arguments import names_arguments
from memopt.nn.linear import around, check_kinds


class LinearCrossEntropy(nn.Module):
    """A Linear and the cross entropy of its output, by memopt.functional.linear_cross_entropy: the
    logits never exist as a whole.

    `state_dict` keys are those of torch.nn.LinearCrossEntropyLoss: linear.weight, linear.bias,
    and weight, the classes' weights, if they are given.

    Args:
        in_features, num_classes: of the linear.
        bias: whether it has a bias. Default False.
        device, dtype: of its parameters.
        weight, reduction, ignore_index, label_smoothing, softcap, logit_scale, z_loss, chunk: as
            for memopt.functional.linear_cross_entropy.

    Shape: input (*, in_features) and target (*) or (*, num_classes) to [], or (*) with reduction
    "none".
    """

    weight: Tensor | None

    @names_arguments
    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        weight: Tensor | None = None,
        reduction: str = "mean",
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        z_loss: float = 0.0,
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        self._settings: dict[str, Any] = {
            "reduction": reduction,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "softcap": softcap,
            "logit_scale": logit_scale,
            "z_loss": z_loss,
            "chunk": chunk,
        }

    def forward(
        self, input: Tensor, target: Tensor, num_items: float | Tensor | None = None
    ) -> Tensor:
        return functional.linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            linear_bias=self.linear.bias,
            weight=self.weight,
            num_items=num_items,
            **self._settings,
        )

    @classmethod
    def from_modules(cls, linear: nn.Linear, loss: nn.CrossEntropyLoss) -> LinearCrossEntropy:
        """A module on the very parameters of the linear, with the loss's settings."""
        check_kinds("LinearCrossEntropy", loss, nn.CrossEntropyLoss, linear)
        module = around(cls, linear.training, linear=linear)
        module.register_buffer("weight", loss.weight)
        module._settings = {
            "reduction": loss.reduction,
            "ignore_index": loss.ignore_index,
            "label_smoothing": loss.label_smoothing,
        }
        return module

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self._settings.items())
