"""Batch norm over the batches of all ranks as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memopt import functional
from memopt._compat import BatchNormBase
from memopt.functional.arguments import names_arguments


class SyncBatchNorm(BatchNormBase):
    """torch.nn.SyncBatchNorm on memopt.functional.sync_batch_norm, on the CPU (gloo) as on CUDA:
    saves its input, 8 bytes a channel and 8 bytes for backward.

    In evaluation, and where there is one rank, it is memopt.functional.batch_norm. It is a batch
    norm but no subclass of torch.nn.SyncBatchNorm, with which DistributedDataParallel takes no
    model on the CPU. state_dict keys: weight, bias, running_mean, running_var, num_batches_tracked.

    Args:
        num_features: channels of the input.
        eps: added to the variance. Default 1e-5.
        momentum: of the running statistics; None for their average. Default 0.1.
        affine: whether there are weight and bias. Default True.
        track_running_stats: whether there are running statistics. Default True.
        process_group: of the ranks; None for all. Default None.
        device, dtype: of parameters and running statistics.
        bias: whether there is a bias; no effect without affine. Default True.

    Shape: (N, C) or (N, C, *) to the same.
    """

    @names_arguments
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: object = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        without_bias = {} if bias else {"bias": False}
        super().__init__(
            *(num_features, eps, momentum, affine, track_running_stats, device, dtype),
            **without_bias,
        )
        self.process_group = process_group

    def forward(self, input: Tensor) -> Tensor:
        running = self.running_mean, self.running_var
        if not self.training:
            has_none = self.running_mean is None and self.running_var is None
            return functional.batch_norm(
                input, *running, self.weight, self.bias, training=has_none, eps=self.eps
            )
        momentum = self.momentum or 0.0
        if not self.track_running_stats:
            running = None, None
        elif self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / self.num_batches_tracked.item()
        return functional.sync_batch_norm(
            input, *running, self.weight, self.bias, momentum, self.eps, self.process_group
        )

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: object = None) -> nn.Module:
        """torch.nn.SyncBatchNorm's, with modules of this class in the place of all batch norms."""
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
        made: list[Any] = [m for m in converted.modules() if type(m) is nn.SyncBatchNorm]
        for each in made:
            each.__class__ = cls
        return converted
