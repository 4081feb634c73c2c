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
_BLOCK_BYTES = _MiB


def rows_of_a_chunk(rows: int, words: int, itemsize: int) -> int:
    """How many of the rows of a head's input have logits at a time."""
    sixteenth = min(-(-rows // 16), _MOST_ROWS)
    return min(rows, max(_CHUNK_BYTES // (words * itemsize), sixteenth, _LEAST_ROWS))


def chunked_loss(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """The logits of a chunk, and what the sum of a 16-bit weight's gradient takes beside it."""
    input, weight = args[:2]
    (rows, features), words, itemsize = input.shape, weight.shape[0], input.dtype.itemsize
    if not rows or not words:
        return Scratch(0)
    chunk = rows_of_a_chunk(rows, words, itemsize)
    known = chunk * words * itemsize
    logits = torch.empty((chunk, words), dtype=input.dtype, device="meta")
    products = [product((), (input[:chunk], weight.t()), (logits,))]
    if any(result.shape == input.shape for result in results):
        products.append(product((), (logits, weight), (input[:chunk],)))
    if any(result.shape == weight.shape for result in results):
        block = words
        if itemsize == 2 and (input.dtype == torch.float16 or chunk < rows):
            block = min(words, max(1, _BLOCK_BYTES // max(1, features * itemsize)))
            known += block * features * itemsize
            is_split = input.dtype == torch.bfloat16
            known += weight.numel() if is_split else 0
            # A product of float16 is added to a sum in float32, as a copy.
            known += 0 if is_split or chunk == rows else block * features * 4
        products.append(product((), (logits[:, :block].t(), input[:chunk]), (weight[:block],)))
    return Scratch(known, max(each.known + each.margin for each in products))
