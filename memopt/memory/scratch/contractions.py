"""Scratch of matrix products, convolutions and attention on a CPU: of what oneDNN computes bounds,
since its blocks and buffers are its choice, by processor, threads and sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memopt.memory.scratch.onednn import padded
from memopt.memory.scratch.size import NONE, KiB, Scratch, copy_of, elements_of, format_of

_BLOCK = 256
"""Rows or columns of a matrix that a thread of oneDNN's copies at a time, at the most."""


def product(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """Scratch of a product of the last two tensors, matrices or batches of them."""
    one, other = given[-2:]
    if not results:
        return NONE
    if one.dtype.itemsize == 2 and one.dtype.is_floating_point:
        return Scratch(0, _onednn_product(one, other))
    # What is conjugated is copied whole, but for one matrix that is transposed as well, which BLAS
    # knows. Matrices with other strides than BLAS knows are copied one by one.
    known = 0
    for tensor in (one, other):
        is_known = tensor.dim() == 2 and tensor.stride(0) == 1 and is_for_blas(tensor)
        if (tensor.is_conj() and not is_known) or tensor.is_neg():
            known += elements_of(tensor)
        if not is_for_blas(tensor):
            known += math.prod(tensor.shape[-2:]) * tensor.element_size()
    return Scratch(known)


def is_for_blas(matrix: Tensor) -> bool:
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
    copies = sum(elements_of(tensor) for tensor in (one, other) if not is_for_blas(tensor))
    return copies + min(threads * block, whole) + 64 * KiB * threads


class _Options(NamedTuple):
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int


def convolution(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    source, weight, bias, result = *args[:3], results[0]
    options = _Options(*args[3:9])
    copied = copy_of(source)
    if _by_onednn(source, weight, bias, options):
        blocked = _blocked(source, weight, options) + padded(weight, 2)
        blocked += _uncropped(result, options)
        aside = _aside(source, weight, result, options)
        return Scratch(0, copied + blocked + aside + 64 * KiB)
    columns = _columns(source, weight, result, options.transposed)
    parts = source.nbytes + 2 * _uncropped(result, options)
    return Scratch(0, copied + columns + padded(weight, 2) + parts)


def convolution_backward(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    gradient, source, weight = args[:3]
    options = _Options(*args[4:10])
    copied = copy_of(gradient) + copy_of(source)
    if _by_onednn(source, weight, None, options):
        blocked = _uncropped(gradient, options) + padded(source)
        sums = torch.get_num_threads() * padded(weight, 2, 4)
        blocked += padded(weight, 2) + _aside(source, weight, gradient, options)
        if _by_product(source, weight, options):
            blocked += padded(weight, 2)  # in the order of the product, for each of its gradients
        blocked += _weights_by_group(source, weight, options)
        return Scratch(0, copied + 2 * blocked + sums + 64 * KiB)
    columns = _columns(source, weight, gradient, options.transposed)
    parts = 2 * source.nbytes + 2 * _uncropped(gradient, options)
    return Scratch(0, copied + 2 * columns + 2 * padded(weight, 2) + padded(source) + parts)


def _by_onednn(source: Tensor, weight: Tensor, bias: Tensor | None, options: _Options) -> bool:
    backend = str(torch._C._select_conv_backend(source, weight, bias, *options))
    return "Mkldnn" in backend or "???" in backend  # MkldnnTranspose has no name in Python


def _blocked(source: Tensor, weight: Tensor, options: _Options) -> int:
    """Bytes of the source in blocks. The few channels of an image stay as they are."""
    is_image = source.shape[1] <= 4 and options.groups == 1 and not options.transposed
    return source.nbytes if is_image and math.prod(weight.shape[2:]) > 1 else padded(source)


def _weights_by_group(source: Tensor, weight: Tensor, options: _Options) -> int:
    """Bytes of weights in blocks of 16 for each group, which oneDNN has in 16 bits for images in
    channels last, with sums of them in float32 (measured).
    """
    groups = options.groups
    is_plain = groups == 1 or groups == source.shape[1] == weight.shape[0]
    is_first = format_of(source) is torch.contiguous_format
    if is_plain or is_first or weight.element_size() > 2:
        return 0
    return 3 * groups * padded(weight[: weight.shape[0] // groups], 2)


def _uncropped(result: Tensor, options: _Options) -> int:
    """Bytes of the result in blocks. A transposed convolution crops it from a larger one."""
    if not options.transposed:
        return padded(result)
    sides = result.shape[2:]
    around = [*options.padding, *options.padding][: len(sides)]
    larger = math.prod(
        (side + 2 * pad) / max(1, side) for side, pad in zip(sides, around, strict=True)
    )
    return 2 * math.ceil(padded(result) * larger)


def _aside(source: Tensor, weight: Tensor, result: Tensor, options: _Options) -> int:
    """Bytes that kernels without blocks take: sums in float32, of two threads at the most, where
    windows are single places or the convolution is transposed; and what `_by_product` is for.
    """
    groups, by_product = options.groups, _by_product(source, weight, options)
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


def _by_product(source: Tensor, weight: Tensor, options: _Options) -> bool:
    """Whether it may be a product for each image, of the windows of all positions: where groups are
    not single channels, places are skipped, or the processor is older than oneDNN's kernels.
    """
    groups = options.groups
    is_depthwise = groups == source.shape[1] == weight.shape[0]
    is_old = torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    return (groups > 1 and not is_depthwise) or max(options.dilation) > 1 or is_old


def _columns(source: Tensor, weight: Tensor, result: Tensor, transposed: bool) -> int:
    """The window of each position, written side by side."""
    small, large = (source, result) if transposed else (result, source)
    window = math.prod(weight.shape[2:])
    positions = math.prod(small.shape[2:])
    return large.shape[0] * large.shape[1] * window * positions * source.element_size()


def attention(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
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


def attention_backward(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    gradient, query, key, output = args[0], args[1], args[2], args[4]
    rows, columns = _blocks(query, key)
    threads = torch.get_num_threads()
    itemsize = max(4, query.dtype.itemsize)
    known = itemsize * (threads * 2 * rows * columns + rows)
    margin = sum(2 * elements_of(t) for t in (gradient, output)) // 2
    if query.dtype.itemsize == 2:
        known += threads * 2 * 2 * rows * columns
        margin += threads * (64 * KiB + 4 * (rows + columns) * max(64, query.shape[-1]))
    return Scratch(known, margin)


def _blocks(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Rows of queries and of keys that a thread takes at a time."""
    length = query.shape[2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, key.shape[2])
