"""Dropout without masks."""

from __future__ import annotations

import torch
from torch import Tensor

import memopt._extension  # noqa: F401  (registers the operators)


def dropout(input: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Zeroes elements at random, each with probability p, and divides the others by 1 - p.

    Which ones is a function of a seed and of the element's index: no mask is stored. Saves for
    backward: seed and offset, 16 bytes a call. They come from the default generator of input's
    device, so torch.manual_seed and checkpoints replay them; the mask depends on nothing else, not
    on dtype, threads or device properties. p is met to 2^-17. Source: Srivastava et al., JMLR 15
    (2014); the numbers are Philox4x32-10's (Salmon et al., SC'11).

    Autocast leaves the dtype alone, as it does for PyTorch's dropout.

    On CUDA a compiled graph draws its state by an op of PyTorch's, so for one seed its mask is not
    eager's; and eager calls cannot be captured in a CUDA graph (the generator says so).

    Args:
        input: any shape. Zeroed elements are multiplied by 0: infinities and NaN become NaN, as in
            PyTorch.
        p: the probability of zeroing an element, from 0 to 1. Default 0.5.
        training: False returns input itself, and so does p = 0: no copy, nothing drawn.

    Returns:
        A contiguous tensor of input's shape and dtype.

    Raises:
        ValueError: p is not between 0 and 1.
        RuntimeError: an unsupported dtype, device or layout.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout: p must be between 0 and 1, got {p}")
    if not training or p == 0.0:
        return input
    output: Tensor = torch.ops.memopt.dropout(input, p)
    return output
