"""Scratch of memopt's kernels on a CPU.

They copy what is in no order that they compute in, have buffers for results that are in none, and
sum parameters' gradients in parts. A call is measured (measured.py); this is the bound where it is
not: for large tensors, and for ops that draw random numbers, which a call would use up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from memopt.memory.scratch.size import TRANSPOSED, KiB, Scratch, copy_in, elements_of

_ROWS_OF_A_PART = 16
"""Rows whose share of a parameter's gradient is added up first, at the least."""
_SUMS = 2
"""Sums of one column: for the weight's gradient and the bias's, in float32 at the least."""
_INPUT, _OUTPUT_MASK = 1, 8
"""The arguments of `_channel_norm_backward`: the input, and which gradients are wanted."""


def of_kernel(args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]) -> Scratch:
    """Copies and buffers, of a matrix through another buffer; and sums of the parts of the largest
    tensor.
    """
    sizes = [(copy_in(tensor), tensor.element_size()) for tensor in (*given, *results)]
    copied = sum(nbytes + TRANSPOSED * itemsize for nbytes, itemsize in sizes if nbytes)
    largest = max((t.numel() * max(4, t.element_size()) for t in given), default=0)
    return Scratch(0, copied + _SUMS * largest // _ROWS_OF_A_PART + KiB)


def of_channel_norm_backward(
    args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor]
) -> Scratch:
    """Adds a buffer of the input's size where no gradient of it is wanted, which the gradient of an
    activation behind goes through in its place.
    """
    found = of_kernel(args, given, results)
    if args[_OUTPUT_MASK][0]:
        return found
    return Scratch(found.known, found.margin + elements_of(args[_INPUT]))
