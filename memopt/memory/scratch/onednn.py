"""Sizes of what oneDNN allocates for PyTorch on a CPU: workspaces exactly, scratch at the most.

Source: the layout of a workspace is that of oneDNN's rnn_utils (regions that begin at pages, rows
padded to cache lines and not to multiples of 256 elements).
"""

from __future__ import annotations

import math

from torch import Tensor

_PAGE = 4096
_CHANNELS = 16
"""Channels are padded to a multiple of this in a blocked layout."""


def lstm_workspace(steps: int, rows: int, inputs: int, hidden: int, itemsize: int) -> int:
    """Bytes that forward keeps for backward, of one layer in one direction."""
    states = 2 * (steps + 1) * rows
    regions = (
        steps * rows * _row(4 * hidden, itemsize) * itemsize,  # gates
        steps * rows * _row(hidden, itemsize) * itemsize,
        states * _row(max(inputs, hidden), itemsize) * itemsize,
        states * hidden * itemsize,  # cells
        2
        * states
        * _row(max(inputs, hidden), 4)
        * 4,  # gradients, of a layer's and a step's states
        states * hidden * 4,
    )
    whole = 0
    for place, nbytes in enumerate(regions):
        for part in (nbytes // 2, nbytes // 2) if place == 4 else (nbytes,):
            whole = _up(whole + part, _PAGE)
    return whole


def lstm_scratch(source: Tensor, to_gates: Tensor, between: Tensor, backward: bool) -> int:
    """The most bytes inside one call: weights in another order, gates of all steps, gradients.

    Args:
        source: of shape [steps, rows, inputs].
        to_gates, between: weights of shapes [4 hidden, inputs] and [4 hidden, hidden].
    """
    steps, rows, inputs = source.shape
    hidden = between.shape[1]
    wide = _row(max(inputs, hidden), 4)
    weights = 4 * (inputs + hidden) * _row(4 * hidden, 4)
    turned = 4 * 4 * hidden * (_row(inputs, 4) + _row(hidden, 4))
    gates = 4 * steps * rows * _row(4 * hidden, 4)
    buffers = 3 * 4 * rows * wide + 8 * _PAGE
    if not backward:
        return weights + gates + buffers + 16 * hidden
    copies = 4 * (steps + 4) * rows * hidden
    return 2 * (weights + turned) + gates + buffers + copies + 64 * hidden


def padded(tensor: Tensor, channels: int = 1, itemsize: int = 0) -> int:
    """Bytes with its channels padded, as in a blocked layout.

    Args:
        channels: how many dimensions are: the second one (1), or the first two, of weights (2).
        itemsize: 0: the tensor's.
    """
    shape = list(tensor.shape)
    for dim in (1,) if channels == 1 else (0, 1):
        shape[dim] = _up(shape[dim], _CHANNELS)
    return math.prod(shape) * (itemsize or tensor.element_size())


def _row(elements: int, itemsize: int) -> int:
    line = 64 // itemsize
    elements = _up(elements, line)
    return elements + line if elements % 256 == 0 else elements


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
