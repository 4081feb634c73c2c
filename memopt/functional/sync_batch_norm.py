"""Batch norm over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from memopt._extension import ops
from memopt.functional.arguments import names_arguments


def group_of_ranks(process_group: object) -> tuple[int, str]:
    """How many ranks the group has (None: all of them), 0 where this rank is not in it, and its
    name. One rank where no process group was initialised.
    """
    if not dist.is_available():
        return 1, ""
    # torch.distributed.new_group gives a number to a rank that is not in the group.
    is_outside = process_group == dist.GroupMember.NON_GROUP_MEMBER
    if not (process_group is None or is_outside or isinstance(process_group, dist.ProcessGroup)):
        raise TypeError(
            "sync_batch_norm: process_group must be a ProcessGroup or None, got "
            f"{type(process_group).__name__}"
        )
    if not dist.is_initialized():
        return 1, ""
    if is_outside:
        return 0, ""
    group: Any = dist.group.WORLD if process_group is None else process_group
    return dist.get_world_size(group), group.group_name


@names_arguments
def sync_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    process_group: object = None,
) -> Tensor:
    """batch_norm in training by the statistics of all ranks' inputs together; with gloo on the CPU.

    Each rank may have another number of samples, or none, and must call it, and run its backward,
    in the order in which the others do. Forward gathers 16 bytes a channel from each rank, backward
    adds up as many over the ranks; gradients of weight and bias are this rank's alone, as
    torch.nn.SyncBatchNorm has them. The running statistics move as batch_norm's, on all ranks in
    the same bits. Saves for backward what batch_norm saves, and 8 bytes. A checkpointed region
    gathers again when it recomputes; a recipe does not. On one rank this is batch_norm.

    Args:
        input: (N, C) or (N, C, *); every rank's has C channels.
        running_mean, running_var, weight, bias, momentum, eps: as for batch_norm.
        process_group: of the ranks; None for all. Default None.

    Returns:
        A tensor of input's shape and dtype; contiguous, or in channels-last if input is.

    Raises:
        RuntimeError: as for batch_norm, where on the CPU all ranks together have one value to a
            channel; or backward runs with create_graph=True.
        ValueError: this rank is not in the group.
        TypeError: process_group is of another kind.
    """
    size, name = group_of_ranks(process_group)
    if size == 0:
        raise ValueError("sync_batch_norm: process_group must be one that this rank is in")
    output: Tensor = ops.sync_batch_norm(
        *(input, running_mean, running_var, weight, bias, momentum, eps),
        group_size=size,
        group_name=name,
    )
    return output
