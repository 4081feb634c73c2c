"""Scratch of CPU kernels: the memory that they allocate and free inside themselves.

Much of it follows from the arguments: copies of tensors that have another dtype or other strides
than the kernel wants, and buffers for each thread. The memory that oneDNN allocates depends on the
processor. So it is measured, or has a bound, the margin: between nothing and so many bytes are
allocated.

Source: PyTorch's native CPU kernels (TensorIterator's common dtype, LinearAlgebra's preparation for
BLAS, FlashAttentionKernel's blocks), and measurements of oneDNN 3 on processors with AVX-512.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from memopt.memory.scratch.indices import INDICES
from memopt.memory.scratch.losses import OF_LOSSES
from memopt.memory.scratch.maps import MAPS, resampling, resampling_backward
from memopt.memory.scratch.matrices import MATRICES
from memopt.memory.scratch.measured import is_quick, measured
from memopt.memory.scratch.onednn import lstm_scratch
from memopt.memory.scratch.ours import of_channel_norm_backward, of_kernel
from memopt.memory.scratch.size import (
    NONE,
    Scratch,
    ScratchRule,
    contiguous,
    copies,
    copy_in,
    copy_of,
    elements_of,
    runs,
)
from memopt.memory.scratch.transforms import fourier, fourier_to_real, matrix_exponential

_ROWS_OF_FEATURES = 2
"""Dimensions."""


def scratch_of(
    func: Any,
    args: Sequence[Any],
    given: Sequence[Tensor],
    results: Sequence[Tensor],
    kwargs: Mapping[str, Any] | None = None,
) -> Scratch:
    """The scratch of an operator on the CPU; nothing is known of those of sparse tensors.

    Args:
        args: the positional arguments; `given`: the tensors among all of them.
        kwargs: those by name, by which memopt's ops are told apart.
    """
    rule = _rule_of(func)
    if rule is None or any(tensor.layout is not torch.strided for tensor in (*given, *results)):
        return NONE
    scratch = rule(args, given, results)
    if scratch.margin and is_quick(func, args, given, results):
        found = measured(func, args, kwargs)
        if found is not None:
            known = min(scratch.known, found)
            return Scratch(known, measured=found - known)
    return scratch


@lru_cache(maxsize=4096)
def _rule_of(func: Any) -> ScratchRule | None:
    name: str = func.overloadpacket.__name__
    rule = _RULES.get(name)
    if rule is None and func.namespace == "memopt":
        return of_kernel
    if rule is None and torch.Tag.pointwise in func.tags:
        return _promotion
    if rule is None and name.lstrip("_").startswith("upsample"):
        return resampling_backward if name.endswith("backward") else resampling
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
    """A sum or norm in another dtype than its input's is one of a copy."""
    source, result = given[0], results[0]
    is_norm = source.is_complex() and source.dtype.to_real() is result.dtype
    if source.dtype is result.dtype or is_norm:
        return NONE
    return Scratch(source.numel() * result.dtype.itemsize)


def _sum(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """A sum of 16-bit elements over dimensions that no single stride goes through is one of a copy
    in float32 (`should_use_acc_buffer` in ReduceOps.cpp).
    """
    source, result = given[0], results[0]
    dims = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    if not _is_reduced(source) or not _is_reduced(result) or runs(source, dims) < 2:
        return _reduction(args, given, results)
    return Scratch(4 * (source.numel() + result.numel()))


def _is_reduced(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() == 2


def _log_of_sum(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """Maxima, the exponentials of what is below them, and a sum of these."""
    source, result = args[0], results[0]
    summed = _sum((source, args[1]), (source,), results)
    return Scratch(source.numel() * result.element_size() + elements_of(result) + summed.known, 64)


def _extreme(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """A contiguous copy for the extreme of all elements; two tensors go element by element."""
    if len(args) == 1:
        return Scratch(copy_in(args[0]))
    return _promotion(args, given, results) if isinstance(args[1], Tensor) else NONE


def _windows_backward(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """The places along the dimension."""
    return Scratch(8 * args[1][args[2]] if args[1] else 8)


def _scaled_by_power(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """The powers of two."""
    power = args[1]
    itemsize = power.element_size() if power.is_floating_point() else 4
    return Scratch(power.numel() * itemsize + _promotion(args, given, results).known)


def _renormalized(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """Norms, of 16 bits of a copy in float32."""
    copied = 4 * args[0].numel() if _is_reduced(args[0]) else 0
    return Scratch(copied, 64 * args[0].shape[args[2]])


def _gelu_backward(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """oneDNN may copy both where they have different strides."""
    gradient, source = args[:2]
    known = _promotion(args, given, results).known
    is_turned = gradient.stride() != source.stride()
    return Scratch(known, 2 * elements_of(source) if is_turned else 0)


def _mean(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """A mean of 16-bit elements is computed in float32."""
    source, result = given[0], results[0]
    if source.dtype.itemsize == 2 or source.dtype is not result.dtype:
        itemsize = max(4, result.dtype.itemsize)
        return Scratch(source.numel() * itemsize, result.numel() * itemsize + 16)
    return NONE


def _layer_norm_backward(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """Copies, and for each thread the sums of both parameters' gradients."""
    gradient, source, shape, weight = *args[:3], args[5]
    sums = 2 * torch.get_num_threads() * math.prod(shape) * source.element_size()
    return Scratch(sum(map(copy_in, (gradient, source, weight, weight))) + sums)


def _channels(places: Sequence[int], factor: int, has_two: bool = False) -> ScratchRule:
    """Sums for each channel of each row, `factor` of them.

    Args:
        has_two: there are two results, of which one is returned.
    """

    def rule(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
        sums = math.prod(args[places[-1]].shape[:2]) * 8
        copied = sum(copy_of(args[place]) for place in places)
        if results and (results[0].dtype.itemsize == 2 or has_two):
            copied += elements_of(results[0])
        if len({args[place].stride() for place in places}) > 1:
            copied += elements_of(args[places[-1]])  # one format is made the other's
        return Scratch(0, copied + factor * sums)

    return rule


def _group_norm(places: Sequence[int], backward: bool = False) -> ScratchRule:
    """A rule: that of `_channels`; of what is contiguous two sums for each channel, in backward."""
    in_any_format = _channels(places, 2)

    def rule(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
        if not all(args[place].is_contiguous() for place in places):
            return in_any_format(args, given, results)
        source = args[places[-1]]
        sums = 2 * max(4, source.element_size()) * math.prod(source.shape[:2])
        return Scratch(sums if backward else 0)

    return rule


def _batch_norm(places: Sequence[int], backward: bool = False) -> ScratchRule:
    """A rule: of images that of `_channels`; rows of features (N, C) have sums for each channel."""
    of_images = _channels(places, 4, has_two=backward)

    def rule(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
        source = args[places[-1]]
        if source.dim() != _ROWS_OF_FEATURES:
            return of_images(args, given, results)
        sums = 4 * 8 * source.shape[1]
        are_contiguous = all(args[place].is_contiguous() for place in places)
        if backward:  # the contiguous kernel allocates the gradient of its input a second time
            return Scratch(elements_of(results[0]) if are_contiguous and results else 0, sums)
        is_copied = not are_contiguous and source.dtype.itemsize == 2
        return Scratch(0, sums + 2 * elements_of(source) * is_copied)  # in float32

    return rule


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


def _of_weighted_bags(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """The bag of each word, counted up, where forward kept none; and a gradient of one stride."""
    bags = 16 * (args[2].numel() + 2) if not args[4].numel() else 0
    return Scratch(bags, copy_in(args[0]))


def _ctc(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """Backward may take as much as forward kept."""
    return Scratch(0, max(tensor.nbytes for tensor in given))


def _lstm(backward: bool) -> ScratchRule:
    def rule(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
        return Scratch(0, lstm_scratch(args[0], args[1], args[2], backward))

    return rule


_RULES: dict[str, ScratchRule] = {
    **MAPS,
    **OF_LOSSES,
    **INDICES,
    **MATRICES,
    **dict.fromkeys(("mm", "bmm", "baddbmm"), product),
    **dict.fromkeys(("nansum", "prod", "cumsum", "cumprod", "linalg_vector_norm"), _reduction),
    "sum": _sum,
    "logsumexp": _log_of_sum,
    **dict.fromkeys(("max", "min"), _extreme),
    **dict.fromkeys(("mse_loss_backward", "smooth_l1_loss_backward", "floor_divide"), _promotion),
    "unfold_backward": _windows_backward,
    "ldexp": _scaled_by_power,
    "renorm": _renormalized,
    "gelu_backward": _gelu_backward,
    "mean": _mean,
    "embedding_dense_backward": copies(0),
    "native_layer_norm": contiguous(0, 2, 3),
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm": _group_norm((0,)),
    "native_group_norm_backward": _group_norm((0, 1), backward=True),
    "native_batch_norm": _batch_norm((0,)),
    "_native_batch_norm_legit": _batch_norm((0,)),
    "native_batch_norm_backward": _batch_norm((0, 1), backward=True),
    "_channel_norm_backward": of_channel_norm_backward,
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
    **dict.fromkeys(("where", "masked_fill", "masked_fill_"), _with_mask),
    "_embedding_bag": _of_bags,
    "_embedding_bag_per_sample_weights_backward": _of_weighted_bags,
    "_embedding_bag_backward": _backward_of_bags,
    "_ctc_loss_backward": _ctc,
    "_linear_cross_entropy": chunked_loss,
    "_fft_r2c": fourier,
    "_fft_c2c": fourier,
    "_fft_c2r": fourier_to_real,
    "linalg_matrix_exp": matrix_exponential,
    "mkldnn_rnn_layer": _lstm(backward=False),
    "mkldnn_rnn_layer_backward": _lstm(backward=True),
}
