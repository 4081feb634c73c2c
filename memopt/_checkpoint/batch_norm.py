"""Normalisation layers' running statistics move in forward and stand still in the recompute.

For the time of a recompute the layers get copies of their statistics, which the second forward may
move as it likes, and afterwards their own tensors back. In training the output does not depend on
them, and passing them as usual, rather than not at all, saves the same tensors as forward did.

The engine finds the layers (csrc/python/modules_reached.h) and calls `hold_statistics`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

from torch import Tensor, nn

from memopt.memory.modules import ByModule

# Two threads may recompute the same layer at once: the first one in makes the copies, the last one
# out gives the statistics back.
_lock = threading.Lock()
_own_buffers: ByModule[dict[str, Tensor | None]] = ByModule()
_holders: ByModule[int] = ByModule()


def hold_statistics(layers: list[nn.Module]) -> Callable[[], None]:
    """Makes calls of `layers` move copies of their statistics, until the result is called."""
    with _lock:
        for layer in layers:
            if layer not in _holders:
                own = dict(layer._buffers)
                copies = {name: b if b is None else b.clone() for name, b in own.items()}
                layer._buffers.update(copies)
                _own_buffers[layer] = own
            _holders[layer] = _holders.get(layer, 0) + 1
    return functools.partial(_give_back, layers)


def _give_back(layers: list[nn.Module]) -> None:
    with _lock:
        for layer in layers:
            _holders[layer] -= 1
            if not _holders[layer]:
                del _holders[layer]
                layer._buffers.update(_own_buffers.pop(layer))
