"""What CPU kernels allocate and free inside themselves, which no operator returns.

Much of it follows from the arguments: copies of what has another dtype or other strides than the
kernel wants, and buffers for each thread. What oneDNN allocates depends on the processor, so of
that there is a bound, which is called the margin: at least nothing and at most so much is there.

Source: PyTorch's native CPU kernels (TensorIterator's common dtype, LinearAlgebra's preparation for
BLAS, FlashAttentionKernel's blocks), and measurements of oneDNN 3 on processors with AVX-512.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memopt.anatomy.onednn import lstm_scratch, padded

_KiB = 1 << 10
_BLOCK = 256
"""Rows or columns of a matrix that a thread of oneDNN's copies at a time, at the most."""


class Scratch(NamedTuple):
    """Bytes inside one call of an operator, beside what it reads and returns."""

    known: int
    margin: int = 0
    """What may come on top."""


NONE = Scratch(0)


def scratch_of(
    func: Any, args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """Of an operator on the CPU.

    Args:
        args: the positional arguments; `given`: the tensors among all of them.
    """
    rule = _rule_of(func)
    return NONE if rule is None else rule(args, given, results)


Rule = Callable[[Sequence[Any], Sequence[Tensor], Sequence[Tensor]], Scratch]


@lru_cache(maxsize=4096)
def _rule_of(func: Any) -> Rule | None:
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
    """The same, but a mask is read as it is."""
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
    """Of 16 bits in float32."""
    source, result = given[0], results[0]
    if source.dtype.itemsize == 2 or source.dtype is not result.dtype:
        itemsize = max(4, result.dtype.itemsize)
        return Scratch(source.numel() * itemsize, result.numel() * itemsize + 16)
    return NONE


def _copies(*places: int) -> Rule:
    """Arguments that are made contiguous."""

    def rule(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
        return Scratch(sum(_copy(args[place]) for place in places if place < len(args)))

    return rule


def _copy(value: Any) -> int:
    if not isinstance(value, Tensor) or _is_dense(value):
        return 0
    return value.numel() * value.element_size()


def _is_dense(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = layouts.get(tensor.dim())
    return layout is not None and tensor.is_contiguous(memory_format=layout)


def _backward_of_a_map(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    return Scratch(_copy(given[0]))


def _resampling(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """With its channels last, where a kernel chooses so."""
    return Scratch(0, sum(t.numel() * t.element_size() for t in (given[0], *results)))


def _product(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """Of the last two of the tensors, matrices or batches of them."""
    one, other = given[-2:]
    if not results:
        return NONE
    if one.dtype.itemsize == 2 and one.dtype.is_floating_point:
        return Scratch(0, _onednn_product(one, other))
    # What is conjugated is copied whole, but for one matrix that is transposed as well, which BLAS
    # knows. Matrices with other strides than BLAS knows are copied one by one.
    known = 0
    for tensor in (one, other):
        is_known = tensor.dim() == 2 and tensor.stride(0) == 1 and _is_for_blas(tensor)
        if (tensor.is_conj() and not is_known) or tensor.is_neg():
            known += tensor.numel() * tensor.element_size()
        if not _is_for_blas(tensor):
            known += math.prod(tensor.shape[-2:]) * tensor.element_size()
    return Scratch(known)


def _is_for_blas(matrix: Tensor) -> bool:
    rows, columns = matrix.shape[-2:]
    down, right = matrix.stride()[-2:]
    by_columns = (down == 1 or rows <= 1) and right >= max(1, rows)
    by_rows = (right == 1 or columns <= 1) and down >= max(1, columns)
    return by_columns or by_rows


def _onednn_product(one: Tensor, other: Tensor) -> int:
    """Blocks of both matrices and sums in float32 for each thread, never more than all of them; and
    the whole of what has other strides than oneDNN knows.
    """
    inner = one.shape[-1]
    rows, columns = one.shape[-2] + 63, other.shape[-1] + 63
    down, right = min(rows, _BLOCK), min(columns, _BLOCK)
    block = one.dtype.itemsize * inner * (down + right) + 4 * down * right
    threads = torch.get_num_threads()
    batches = math.prod(one.shape[:-2])
    whole = batches * one.dtype.itemsize * inner * (rows + columns)
    whole += batches * 4 * threads * rows * columns
    copies = sum(
        tensor.numel() * tensor.element_size()
        for tensor in (one, other)
        if not _is_for_blas(tensor)
    )
    return copies + min(threads * block, whole) + 64 * _KiB * threads


class _Options(NamedTuple):
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int


def _convolution(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    source, weight, bias, result = *args[:3], results[0]
    options = _Options(*args[3:9])
    copied = _copy(source)
    if _by_onednn(source, weight, bias, options):
        blocked = _blocked(source, weight, options) + padded(weight, 2)
        blocked += _uncropped(result, options)
        aside = _aside(source, weight, result, options)
        return Scratch(0, copied + blocked + aside + 64 * _KiB)
    columns = _columns(source, weight, result, options.transposed)
    parts = source.nbytes + 2 * _uncropped(result, options)
    return Scratch(0, copied + columns + padded(weight, 2) + parts)


def _convolution_backward(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    gradient, source, weight = args[:3]
    options = _Options(*args[4:10])
    copied = _copy(gradient) + _copy(source)
    if _by_onednn(source, weight, None, options):
        blocked = _uncropped(gradient, options) + padded(source)
        sums = torch.get_num_threads() * padded(weight, 2, 4)
        blocked += padded(weight, 2) + _aside(source, weight, gradient, options)
        return Scratch(0, copied + 2 * blocked + sums + 64 * _KiB)
    columns = _columns(source, weight, gradient, options.transposed)
    parts = 2 * source.nbytes + 2 * _uncropped(gradient, options)
    return Scratch(0, copied + 2 * columns + 2 * padded(weight, 2) + padded(source) + parts)


def _by_onednn(source: Tensor, weight: Tensor, bias: Tensor | None, options: _Options) -> bool:
    backend = str(torch._C._select_conv_backend(source, weight, bias, *options))
    return "Mkldnn" in backend or "???" in backend  # MkldnnTranspose has no name in Python


def _blocked(source: Tensor, weight: Tensor, options: _Options) -> int:
    """The few channels of an image stay as they are."""
    is_image = source.shape[1] <= 4 and options.groups == 1 and not options.transposed
    return source.nbytes if is_image and math.prod(weight.shape[2:]) > 1 else padded(source)


def _uncropped(result: Tensor, options: _Options) -> int:
    """A transposed convolution's is cropped from a larger one."""
    if not options.transposed:
        return padded(result)
    sides = result.shape[2:]
    around = [*options.padding, *options.padding][: len(sides)]
    larger = math.prod(
        (side + 2 * pad) / max(1, side) for side, pad in zip(sides, around, strict=True)
    )
    return 2 * math.ceil(padded(result) * larger)


def _aside(source: Tensor, weight: Tensor, result: Tensor, options: _Options) -> int:
    """Of kernels that are not those of blocks: sums in float32, of two threads at the most, where
    windows are single places or the convolution is transposed; and a product for each image, where
    groups are not single channels, or places are skipped.
    """
    groups = options.groups
    is_depthwise = groups == source.shape[1] == weight.shape[0]
    by_product = (groups > 1 and not is_depthwise) or max(options.dilation) > 1
    if not by_product and not options.transposed and math.prod(weight.shape[2:]) > 1:
        return 0
    threads = torch.get_num_threads()
    sums = _uncropped(result, options) * 4 // min(4, result.element_size()) * min(threads, 2)
    sums += padded(source, 1, 4)
    if not by_product:
        return sums
    whole = _columns(source, weight, result, options.transposed)
    each = whole // max(1, source.shape[0] * groups) * 4 // min(4, source.element_size())
    return sums + threads * each


def _columns(source: Tensor, weight: Tensor, result: Tensor, transposed: bool) -> int:
    """The window of each position, written side by side."""
    small, large = (source, result) if transposed else (result, source)
    window = math.prod(weight.shape[2:])
    positions = math.prod(small.shape[2:])
    return large.shape[0] * large.shape[1] * window * positions * source.element_size()


def _attention(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """Scores, statistics and sums of a block for each thread; in 16 bits scores once more, and
    copies of keys and values where a processor multiplies these in an order of its own.
    """
    query, key, value = args[:3]
    rows, columns = _blocks(query, key)
    threads = torch.get_num_threads()
    known = threads * 4 * (rows * columns + 2 * rows + rows * value.shape[-1])
    if query.dtype.itemsize > 2:
        return Scratch(known * query.dtype.itemsize // 4)
    packed = sum(2 * math.prod(t.shape[:-1]) * (t.shape[-1] + 63) for t in (key, value))
    reduced = threads * 2 * rows * (columns + 1)
    return Scratch(known + threads * 2 * rows * columns, packed + reduced)


def _attention_backward(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    gradient, query, key, output = args[0], args[1], args[2], args[4]
    rows, columns = _blocks(query, key)
    threads = torch.get_num_threads()
    itemsize = max(4, query.dtype.itemsize)
    known = itemsize * (threads * 2 * rows * columns + rows)
    margin = sum(2 * t.numel() * t.element_size() for t in (gradient, output)) // 2
    if query.dtype.itemsize == 2:
        known += threads * 2 * 2 * rows * columns
        margin += threads * (64 * _KiB + 4 * (rows + columns) * max(64, query.shape[-1]))
    return Scratch(known, margin)


def _blocks(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Rows of queries and of keys that a thread takes at a time."""
    length = query.shape[2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, key.shape[2])


def _layer_norm_backward(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """Copies, and for each thread the sums of both parameters' gradients."""
    gradient, source, shape = args[:3]
    sums = 2 * torch.get_num_threads() * math.prod(shape) * source.element_size()
    return Scratch(_copy(gradient) + _copy(source) + sums)


def _channels(copied: Sequence[int], factor: int) -> Rule:
    """Sums for each channel of each row, `factor` of them."""

    def rule(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
        sums = math.prod(args[copied[-1]].shape[:2]) * 8
        copies = sum(_copy(args[place]) for place in copied)
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
    return Scratch(0, _copy(given[0]) + 8 * 6 * (places + 1))


def _ctc(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """As much as forward kept."""
    return Scratch(0, max(tensor.nbytes for tensor in given))


def _lstm(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    return Scratch(0, lstm_scratch(args[0], args[1], args[2], backward=False))


def _lstm_backward(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    return Scratch(0, lstm_scratch(args[0], args[1], args[2], backward=True))


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _product),
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
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "binary_cross_entropy_with_logits": _loss_with_logits,
    **dict.fromkeys(("where", "masked_fill", "masked_fill_"), _with_mask),
    "_embedding_bag": _of_bags,
    "_embedding_bag_backward": _of_bags,
    "_ctc_loss_backward": _ctc,
    "sort": _sorting,
    "median": _sorting,
    "mkldnn_rnn_layer": _lstm,
    "mkldnn_rnn_layer_backward": _lstm_backward,
}
