"""The log of a step whose frozen linear weights are stored in 4 or 8 bits, as bitsandbytes does.

A weight of n elements takes n x bits / 8 bytes; with 4 bits (NF4, QLoRA) there are 4 bytes more for
each 64 elements, which scale them, with 8 bits 4 for each row. A linear computes with the weight in
the compute dtype, which is there while it runs: the largest one counts throughout. Source: Dettmers
et al., arXiv:2305.14314 (without double quantisation, which takes the 4 bytes to 1.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from memopt.memory.pieces import TEMPORARY, WEIGHTS, Entry, Piece, in_order

Bits = Literal[4, 8]
_BLOCK = 64


def quantized_weights(model: nn.Module) -> dict[str, int]:
    """The names of the weights that are stored in few bits, and how many elements each has.

    They are those of frozen nn.Linear layers, LoRA's base layers among them; the head, which
    transformers leaves alone (the last linear, or one that shares the embedding's weight), is none.
    """
    shared = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    linears = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not module.weight.requires_grad
        and id(module.weight) not in shared
    ]
    heads = {"lm_head", "output", "classifier", "score", "embed_out"}
    return {
        f"{path}.weight": module.weight.numel()
        for path, module in linears
        if path.rpartition(".")[2] not in heads
    }


def with_quantized_weights(
    log: Sequence[Entry], model: nn.Module, bits: Bits, compute: torch.dtype
) -> list[Entry]:
    """The log with these weights smaller, and the largest of them once in the compute dtype."""
    sizes = quantized_weights(model)
    smaller: dict[int, Piece] = {}

    def stored(piece: Piece) -> Piece:
        if piece.category != WEIGHTS or piece.op not in sizes:
            return piece
        scales = piece.shape[0] if bits == 8 else -(-sizes[piece.op] // _BLOCK)
        nbytes = sizes[piece.op] * bits // 8 + 4 * scales
        return smaller.setdefault(id(piece), replace(piece, nbytes=nbytes))

    largest = max(sizes.values(), default=0) * compute.itemsize
    steps = [entry.instant for entry in log if entry.piece.phase in ("forward", "backward")]
    whole = Piece(
        largest, (largest,), torch.uint8, 1, "forward", "a weight in the compute dtype", "", ""
    )
    whole.category = TEMPORARY
    first, last = (min(steps), max(steps)) if steps else (0, 0)
    changed = [entry._replace(piece=stored(entry.piece)) for entry in log]
    if largest and steps:
        changed += [Entry(first, 1, whole), Entry(last, -1, whole)]
    return in_order(changed)
