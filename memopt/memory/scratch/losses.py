"""Scratch of losses on the CPU, and of the softmaxes below them.

Source: ATen/native/Loss.cpp: which of them compute their elements into a buffer of their own; a
mean of 16-bit elements is computed in float32, of a copy (`mean_kernel_impl`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memopt.memory.scratch.size import (
    TRANSPOSED,
    Scratch,
    ScratchRule,
    contiguous,
    copy_in,
    elements_of,
)

_NO_REDUCTION, _MEAN = 0, 1  # as the operators number them


def _of_elements(buffers: int, place: int = 2) -> ScratchRule:
    """Adds so many buffers of the elements' losses to the result's storage, which is one more of
    them but for `huber_loss`, and copies of what has another dtype.

    Args:
        place: of the reduction among the arguments.
    """

    def rule(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
        reduction = args[place] if place < len(args) else _MEAN
        elements = math.prod(torch.broadcast_shapes(*(each.shape for each in args[:2])))
        common = torch.promote_types(args[0].dtype, args[1].dtype)
        casts = sum(
            each.numel() * common.itemsize
            for each in args[:2]
            if each.dtype is not common and each.dim()
        )
        if casts or results[0].dtype is not common:
            casts += elements * common.itemsize
        if reduction == _NO_REDUCTION:
            return Scratch(casts)
        known = buffers * elements * results[0].element_size()
        if reduction != _MEAN or results[0].element_size() > 2:
            return Scratch(known + casts)
        return Scratch(known + max(casts, elements * 4), 16)

    return rule


def _with_logits(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """Logarithms beside a buffer of theirs, beside weights, or beside the loss. Its mean of 16 bits
    is one of a copy, and what has another dtype is copied to the common one.
    """
    source, target, _, positive, reduction = (*args, *(None,) * 5)[:5]
    reduction = _MEAN if reduction is None else reduction
    numbers, common = source.numel(), torch.promote_types(source.dtype, target.dtype)
    logs, losses, whole = (numbers * each.itemsize for each in (source.dtype, target.dtype, common))
    casts = whole * ((source.dtype is not common) + 2 * (target.dtype is not common))
    stages = [logs + copy_in(source), losses + casts]
    if reduction == _MEAN and target.element_size() == 2:
        stages.append(losses + 4 * numbers)
    if positive is not None:
        stages.append(whole + max(elements_of(positive), casts))
    turned = 0 if source.is_contiguous() else TRANSPOSED * source.element_size()
    return Scratch(0, logs + max(stages) + turned - elements_of(results[0]) + 64)


def _soft_margin_backward(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """Two of the products that the gradient is composed of."""
    return Scratch(2 * elements_of(results[0]))


def _safe_softmax(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """A mask of what is minus infinity, and one of the rows that are nothing else."""
    source = args[0]
    rows = source.numel() // max(1, source.shape[args[1]]) if source.dim() else 1
    mask = source.numel() + rows + 64
    return Scratch(mask + copy_in(source), elements_of(source) if source.element_size() == 2 else 0)


OF_LOSSES: dict[str, ScratchRule] = {
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), _of_elements(1)),
    "soft_margin_loss": _of_elements(0),
    "binary_cross_entropy": _of_elements(0, 3),
    "binary_cross_entropy_with_logits": _with_logits,
    "soft_margin_loss_backward": _soft_margin_backward,
    "log_sigmoid_forward": contiguous(0),
    **dict.fromkeys(("multi_margin_loss", "nll_loss2d_forward"), contiguous(0, 1)),
    "multilabel_margin_loss_forward": contiguous(0, 1),
    **dict.fromkeys(("_softmax", "_log_softmax"), contiguous(0)),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), contiguous(0, 1)),
    "_safe_softmax": _safe_softmax,
}
