"""Scratch of CPU kernels: the memory that they allocate and free inside themselves.

Much of it follows from the arguments: copies of tensors that have another dtype or other strides
than the kernel wants, and buffers for each thread. The memory that oneDNN allocates depends on the
processor. So it has a bound, the margin: between nothing and so many bytes are allocated.

Source: PyTorch's native CPU kernels (TensorIterator's common dtype, LinearAlgebra's preparation for
BLAS, FlashAttentionKernel's blocks), and measurements of oneDNN 3 on processors with AVX-512.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor

from memopt.memory.scratch.contractions import (
    attention,
    attention_backward,
    convolution,
    convolution_backward,
    product,
)
from memopt.memory.scratch.head import chunked_loss
from memopt.memory.scratch.onednn import lstm_scratch
from memopt.memory.scratch.size import NONE, Scratch, ScratchRule, copy_of
from memopt.memory.scratch.transforms import fourier, fourier_to_real, matrix_exponential


def scratch_of(
    func: Any, args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """The scratch of an operator on the CPU; nothing is known of those of sparse tensors.

    Args:
        args: the positional arguments; `given`: the tensors among all of them.
    """
    rule = _rule_of(func)
    if rule is None or any(tensor.layout is not torch.strided for tensor in (*given, *results)):
        return NONE
    return rule(args, given, results)


@lru_cache(maxsize=4096)
def _rule_of(func: Any) -> ScratchRule | None:
    name: str = func.overloadpacket.__name__
    rule = _RULES.get(name)
    if rule is None and torch.Tag.pointwise in func.tags:
        return _promotion
    if rule is None and name.startswith("upsample"):
        return _backward_of_a_map if name.endswith("backward") else _resampling
    return rule


def _promotion(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """Element by element on one dtype: what has another one is copied. Only 0-dimensional tensors
    are read as they are.
    """
    return _promoted([tensor for tensor in given if tensor.dim()], results)


def _with_mask(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """The scratch of `_promotion`, but a mask is read as it is."""
    numbers = [t for t in given if t.dim() and t.dtype is not torch.bool]
    return _promoted(numbers, results)


def _promoted(whole: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    made = [tensor for tensor in results if tensor.dim() and tensor.dtype is not torch.bool]
    dtypes = {tensor.dtype for tensor in (*whole, *made)}
    if len(dtypes) < 2:
        return NONE
    common = reduce(torch.promote_types, dtypes)
    written = [tensor for tensor in made if not any(tensor is other for other in whole)]
    copied = sum(t.numel() for t in (*whole, *written) if t.dtype is not common)
    return Scratch(copied * common.itemsize)


def _reduction(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """A sum in another dtype than its input's is one of a copy."""
    source, result = given[0], results[0]
    if source.dtype is result.dtype:
        return NONE
    return Scratch(source.numel() * result.dtype.itemsize)


def _mean(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """A mean of 16-bit elements is computed in float32."""
    source, result = given[0], results[0]
    if source.dtype.itemsize == 2 or source.dtype is not result.dtype:
        itemsize = max(4, result.dtype.itemsize)
        return Scratch(source.numel() * itemsize, result.numel() * itemsize + 16)
    return NONE


def _copies(*places: int) -> ScratchRule:
    """Arguments that are made contiguous."""

    def rule(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
        return Scratch(sum(copy_of(args[place]) for place in places if place < len(args)))

    return rule


def _backward_of_a_map(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    return Scratch(copy_of(given[0]))


def _resampling(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """A kernel may copy its tensors to channels last."""
    return Scratch(0, sum(t.numel() * t.element_size() for t in (given[0], *results)))


def _layer_norm_backward(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """Copies, and for each thread the sums of both parameters' gradients."""
    gradient, source, shape = args[:3]
    sums = 2 * torch.get_num_threads() * math.prod(shape) * source.element_size()
    return Scratch(copy_of(gradient) + copy_of(source) + sums)


def _channels(copied: Sequence[int], factor: int) -> ScratchRule:
    """Sums for each channel of each row, `factor` of them."""

    def rule(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
        sums = math.prod(args[copied[-1]].shape[:2]) * 8
        copies = sum(copy_of(args[place]) for place in copied)
        if results and results[0].dtype.itemsize == 2:
            copies += results[0].numel() * 2
        return Scratch(0, copies + factor * sums)

    return rule


def _sorting(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """A copy, and the places of a row."""
    source = given[0]
    return Scratch(0, source.numel() * (source.element_size() + 8))


def _loss_with_logits(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """Composed of operators inside."""
    return Scratch(0, 3 * given[0].numel() * given[0].element_size() + 64)


def _of_bags(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """Places of words, sorted and counted."""
    places = next((t.numel() for t in given if not t.is_floating_point()), 0)
    return Scratch(0, copy_of(given[0]) + 8 * 6 * (places + 1))


def _backward_of_bags(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """The gradient of maxima is added by their places, column by column."""
    gradient, places = args[0], args[5]
    scratch = _of_bags(args, given, results)
    if places.dim() < 2:
        return scratch
    columns = places.nbytes + gradient.nbytes + 16 * places.shape[0]
    return Scratch(0, max(scratch.margin, columns))


def _ctc(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """Backward may take as much as forward kept."""
    return Scratch(0, max(tensor.nbytes for tensor in given))


def _lstm(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    return Scratch(0, lstm_scratch(args[0], args[1], args[2], backward=False))


def _lstm_backward(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    return Scratch(0, lstm_scratch(args[0], args[1], args[2], backward=True))


_RULES: dict[str, ScratchRule] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), product),
    **dict.fromkeys(("sum", "nansum", "prod", "cumsum", "cumprod"), _reduction),
    "mean": _mean,
    "_log_softmax_backward_data": _copies(0, 1),
    "_softmax_backward_data": _copies(0, 1),
    "embedding_dense_backward": _copies(0),
    "max_pool2d_with_indices_backward": _copies(0),
    "avg_pool2d_backward": _copies(0),
    "_adaptive_avg_pool2d_backward": _copies(0),
    "native_layer_norm": _copies(0),
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm": _channels((0,), 2),
    "native_group_norm_backward": _channels((0, 1), 2),
    "native_batch_norm": _channels((0,), 4),
    "_native_batch_norm_legit": _channels((0,), 4),
    "native_batch_norm_backward": _channels((0, 1), 4),
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
    "binary_cross_entropy_with_logits": _loss_with_logits,
    **dict.fromkeys(("where", "masked_fill", "masked_fill_"), _with_mask),
    "_embedding_bag": _of_bags,
    "_embedding_bag_backward": _backward_of_bags,
    "_ctc_loss_backward": _ctc,
    "_linear_cross_entropy": chunked_loss,
    "_fft_r2c": fourier,
    "_fft_c2c": fourier,
    "_fft_c2r": fourier_to_real,
    "linalg_matrix_exp": matrix_exponential,
    "sort": _sorting,
    "median": _sorting,
    "mkldnn_rnn_layer": _lstm,
    "mkldnn_rnn_layer_backward": _lstm_backward,
}
