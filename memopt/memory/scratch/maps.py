"""Scratch of pooling, padding, resampling and shuffles of images and volumes on the CPU.

A kernel computes in one memory format. Forward takes the input's, for which the result is made.
Backward takes the gradient's, in which the layer behind wrote it, while what it returns has the
input's: where they differ, the result is made in the gradient's and copied.

Source: ATen/native/cpu/{MaxPoolKernel,AvgPoolKernel,AdaptiveAvgPoolKernel,PaddingKernel,
UpSampleKernel}.cpp, `switch (grad_output.suggest_memory_format())`; others name their function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memopt.memory.scratch.contractions import product
from memopt.memory.scratch.size import (
    NONE,
    Scratch,
    ScratchRule,
    contiguous,
    copies,
    copy_in,
    elements_of,
    format_of,
)


def _backward_in_format_of(leader: int, *places: int) -> ScratchRule:
    """Copies of these arguments in the format of one, and of the result, which has the input's."""

    def rule(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
        computed, source = format_of(args[leader]), args[1]
        written = 0 if format_of(source) is computed else elements_of(source)
        return Scratch(written + sum(copy_in(args[place], computed) for place in places))

    return rule


def _contiguous_gradient(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """Copies of the gradient and of the result, which are computed contiguous."""
    return Scratch(sum(copy_in(each) for each in (args[0], *results)))


def _in_format_of_input(*places: int) -> ScratchRule:
    """Copies of these arguments in the format of the first."""

    def rule(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
        return Scratch(sum(copy_in(args[place], format_of(args[0])) for place in places))

    return rule


def resampling(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """A kernel may copy its tensors to channels last. With antialiasing one dimension comes first
    (`separable_upsample_generic_Nd_kernel_impl`), and makes no more than an image that has the
    larger of both sizes everywhere.
    """
    sides = [max(pair) for pair in zip(given[0].shape, results[0].shape, strict=True)]
    between = math.prod(sides) * given[0].element_size()
    return Scratch(0, max(between, elements_of(given[0]) + sum(map(elements_of, results))))


def resampling_backward(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """Copies of the gradient and of the result in the gradient's format."""
    return Scratch(sum(copy_in(each, format_of(args[0])) for each in (args[0], *results)))


def _rolling(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """A result for each further dimension, which all live until the last one is there."""
    dims = args[2] if len(args) > 2 else ()
    return Scratch(max(0, len(dims) - 1) * elements_of(args[0]))


def _grid(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """Places with a one behind, which theta multiplies (`make_base_grid_4D`, `_5D`)."""
    grid = results[0]
    *sides, dims = grid.shape
    places = torch.empty((*sides, dims + 1), dtype=grid.dtype, device="meta")
    places = places.view(sides[0], -1, dims + 1)
    scratch = product((), (places, args[0].transpose(1, 2)), (grid,))
    return Scratch(elements_of(places) + scratch.known, scratch.margin)


def _windows(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """A contiguous copy, and a tensor like the input that grows to the result (`im2col_cpu`)."""
    source = args[0]
    grown = elements_of(source) if results[0].numel() > source.numel() else 0
    return Scratch(copy_in(source) + grown)


def _triangle(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """A copy of a batch whose matrices do not follow one another (`compute_triu_tril_cpu`)."""
    source = args[0]
    step = math.prod(source.shape[-2:])
    for size, stride in zip(source.shape[-3::-1], source.stride()[-3::-1], strict=True):
        if stride != step:
            return Scratch(0 if source.is_contiguous() else elements_of(source))
        step *= size
    return NONE


_FLAT_BACKWARD = (
    *("upsample_bicubic2d_backward", "_upsample_bilinear2d_aa_backward"),
    *("_upsample_bicubic2d_aa_backward", "_upsample_lanczos2d_aa_backward"),
)

MAPS: dict[str, ScratchRule] = {
    **dict.fromkeys(("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"), copies(0)),
    **dict.fromkeys(("adaptive_max_pool2d", "max_pool3d_with_indices"), copies(0)),
    **dict.fromkeys(("reflection_pad2d", "replication_pad2d", "replication_pad3d"), copies(0)),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle", "channel_shuffle"), copies(0)),
    "avg_pool2d_backward": _backward_in_format_of(0, 0),
    "_adaptive_avg_pool2d_backward": _backward_in_format_of(0, 0),
    "max_pool2d_with_indices_backward": _backward_in_format_of(0, 0, 7),
    "max_pool3d_with_indices_backward": _backward_in_format_of(0, 0, 7),
    "adaptive_max_pool2d_backward": _backward_in_format_of(1, 0, 2),
    "reflection_pad2d_backward": _backward_in_format_of(0, 0),
    "replication_pad2d_backward": _backward_in_format_of(0, 0),
    "replication_pad3d_backward": _backward_in_format_of(0, 0),
    **dict.fromkeys(("avg_pool3d", "avg_pool3d_backward"), contiguous(0)),
    "_adaptive_avg_pool3d_backward": contiguous(0),
    "adaptive_max_pool3d_backward": contiguous(0, 2),
    **dict.fromkeys(("fractional_max_pool2d", "fractional_max_pool3d"), contiguous(0)),
    "fractional_max_pool2d_backward": contiguous(0, 4),
    "fractional_max_pool3d_backward": contiguous(0, 4),
    "max_unpool2d": _in_format_of_input(0, 1),
    "max_unpool3d": contiguous(0, 1),
    **dict.fromkeys(("reflection_pad1d", "replication_pad1d", "reflection_pad3d"), contiguous(0)),
    **dict.fromkeys(
        ("reflection_pad1d_backward", "replication_pad1d_backward", "reflection_pad3d_backward"),
        _contiguous_gradient,
    ),
    **dict.fromkeys(_FLAT_BACKWARD, _contiguous_gradient),
    "grid_sampler_2d_backward": contiguous(0),
    "affine_grid_generator": _grid,
    "col2im": contiguous(0),
    "im2col": _windows,
    "roll": _rolling,
    **dict.fromkeys(("tril", "triu"), _triangle),
}
