"""Scratch of memopt's loss in chunks of rows: csrc/ops/linear_cross_entropy.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memopt.memory.scratch.contractions import product
from memopt.memory.scratch.size import Scratch

_MiB = 1 << 20

# As in chunk_rows() and WeightGradient there.
_CHUNK_BYTES = 12 * _MiB
_MOST_ROWS = 512
_LEAST_ROWS = 128
_WORD_BYTES = 1024
_BLOCK_BYTES = 2 * _MiB


def rows_of_a_chunk(rows: int, words: int, itemsize: int, sum_bytes: int = 0) -> int:
    """How many of the rows of a head's input have logits at a time.

    Args:
        sum_bytes: for each word, what the sum of the weight's gradient takes beside its result
            where there are several chunks.
    """
    sixteenth = min(-(-rows // 16), _MOST_ROWS)
    quarter = min(-(-rows // 4), (_WORD_BYTES - sum_bytes) // itemsize)
    each = max(_CHUNK_BYTES // (words * itemsize), sixteenth, quarter, _LEAST_ROWS)
    return rows if (rows - each) * itemsize <= sum_bytes else each


def chunked_loss(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """The logits of a chunk, and what the sum of a 16-bit weight's gradient takes beside it."""
    input, weight = args[:2]
    (rows, features), words, itemsize = input.shape, weight.shape[0], input.dtype.itemsize
    if not rows or not words:
        return Scratch(0)
    has_weight_gradient = any(result.shape == weight.shape for result in results)
    sum_bytes = features if has_weight_gradient and input.dtype == torch.bfloat16 else 0
    chunk = rows_of_a_chunk(rows, words, itemsize, sum_bytes)
    known = chunk * words * itemsize
    logits = torch.empty((chunk, words), dtype=input.dtype, device="meta")
    products = [product((), (input[:chunk], weight.t()), (logits,))]
    if any(result.shape == input.shape for result in results):
        products.append(product((), (logits, weight), (input[:chunk],)))
    blocks = 0
    if has_weight_gradient:
        block = words
        if itemsize == 2 and (input.dtype == torch.float16 or chunk < rows):
            block = min(words, max(1, _BLOCK_BYTES // max(1, features * itemsize)))
            blocks = block * features * itemsize
            is_split = input.dtype == torch.bfloat16
            known += weight.numel() if is_split else 0
            # A product of float16 is added to a sum in float32, as a copy.
            blocks += 0 if is_split or chunk == rows else block * features * 4
        products.append(product((), (logits[:, :block].t(), input[:chunk]), (weight[:block],)))
    if results[-1].shape == (words,):
        blocks = max(blocks, _sum_over_rows(chunk, words, itemsize, results[-1].itemsize))
    known += blocks
    return Scratch(known, max(each.known + each.margin for each in products))


def _sum_over_rows(rows: int, words: int, itemsize: int, sum_itemsize: int) -> int:
    """Bytes of a chunk's part of the bias's gradient, which is summed in blocks of words where
    PyTorch copies the numbers into the type of the sum: as in add_rows() there.
    """
    if itemsize == sum_itemsize:
        return words * sum_itemsize
    block = min(words, max(1, _BLOCK_BYTES // (rows * sum_itemsize)))
    return block * (rows + 1) * sum_itemsize
