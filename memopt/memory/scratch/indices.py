"""Scratch of what reads, writes, sorts and selects by place on the CPU.

Source: ATen/native/cpu/ScatterGatherKernel.cpp (`create_acc_buffer`: 16 bits are written in
float32, of a gather as well), ATen/native/{Sorting,TensorAdvancedIndexing}.cpp.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memopt.memory.scratch.size import (
    NONE,
    TRANSPOSED,
    Scratch,
    ScratchRule,
    contiguous,
    copy_in,
    elements_of,
)


def _by_place(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """A copy in float32 of a result in 16 bits, but not where whole rows are read or written."""
    copied = _in_float32(results[0])
    return Scratch(0, copied) if not any(args[2].stride()[1:]) else Scratch(copied)


def _in_float32(result: Tensor) -> int:
    return 4 * result.numel() if result.element_size() == 2 and result.is_floating_point() else 0


def _reduced_by_place(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """The copy of `_by_place`; a mean counts what is added, by ones in the source's shape."""
    copied = _in_float32(results[0])
    if "mean" not in args:
        return Scratch(0, copied)
    counts = elements_of(results[0]) + elements_of(args[3]) + results[0].numel() + 64
    return Scratch(0, copied + counts)


def _added(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """The copy of `scatter_add`, by which slices are added along the first dimension."""
    return Scratch(0, _in_float32(results[0]))


def _selected(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    return Scratch(0, copy_in(args[0]))


def _put(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """Places of what a mask selects, all of it at the most."""
    if args[2].numel() == 1 and True not in args[3:4]:
        return NONE  # the mask is filled
    masks = [index for index in args[1] if index is not None and index.dtype is torch.bool]
    return Scratch(0, sum(8 * mask.numel() * mask.dim() for mask in masks))


def _masked_backward(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """The selected elements, and zeros behind them; what `_select_by_mask` has is gone before there
    is a result.
    """
    size = elements_of(args[0])
    return Scratch(0, max(_select_by_mask(args, given, results).margin - size, size) + 64)


def _select_by_mask(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """The mask as whole numbers, and for several threads how many are before each place."""
    numbers = math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape))
    several = torch.get_num_threads() > 1
    return Scratch(0, (16 * numbers + elements_of(args[0]) if several else 8 * numbers) + 64)


def _of_all(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """A copy of what is not one row in memory, where the extreme of all elements is looked for."""
    if len(args) > 1 and args[1] is not None:
        return NONE
    source = args[0]
    steps = [each for each in zip(source.shape, source.stride(), strict=True) if each[0] > 1]
    is_row = all(outer[1] == math.prod(inner) for outer, inner in itertools.pairwise(steps))
    return Scratch(0 if is_row else elements_of(source))


def _sorting(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """A copy, and the places of a row."""
    return Scratch(0, given[0].numel() * (given[0].element_size() + 8))


def _median(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """A copy, which is partly sorted in place; of a dimension where its elements are apart."""
    source = args[0]
    if len(args) < 2 or not source.dim():
        return Scratch(elements_of(source))
    if source.stride(args[1]) == 1:
        return NONE
    return Scratch(elements_of(source), TRANSPOSED * source.element_size())


def _counted(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """Edges of the bins, and counts of each thread; copies for them and for the range."""
    rows = 1 + torch.get_num_threads()
    copied = 2 * copy_in(args[0]) + TRANSPOSED * args[0].element_size()
    return Scratch(0, copied * (not args[0].is_contiguous()) + rows * elements_of(results[0]) + 64)


def _kth_value(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """A copy, and the place of each element of it (`kthvalue_out_impl_cpu`)."""
    return Scratch(given[0].numel() * (given[0].element_size() + 8))


def _drawing(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """Numbers for each weight, of which the largest quotients are drawn."""
    return Scratch(0, 2 * elements_of(args[0]) + elements_of(results[0]) + 64)


def _distinct(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """A sorted copy, the places that its elements had, and their numbers."""
    return Scratch(0, args[0].numel() * (args[0].element_size() + 16) + 64)


INDICES: dict[str, ScratchRule] = {
    **dict.fromkeys(("gather", "scatter", "scatter_", "scatter_add", "scatter_add_"), _by_place),
    **dict.fromkeys(("scatter_reduce", "scatter_reduce_"), _reduced_by_place),
    **dict.fromkeys(("index_reduce", "index_reduce_"), _reduced_by_place),
    **dict.fromkeys(("index_add", "index_add_"), _added),
    "index_select": _selected,
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), _put),
    **dict.fromkeys(("masked_scatter", "masked_scatter_"), contiguous(1, 2)),
    "masked_select": _select_by_mask,
    "masked_scatter_backward": _masked_backward,
    **dict.fromkeys(("searchsorted", "bucketize"), contiguous(0, 1)),
    **dict.fromkeys(("argmax", "argmin"), _of_all),
    **dict.fromkeys(("median", "nanmedian"), _median),
    "sort": _sorting,
    "histc": _counted,
    "_unique2": _distinct,
    "kthvalue": _kth_value,
    "multinomial": _drawing,
    "_segment_reduce_backward": contiguous(0, 1, 2),
}
