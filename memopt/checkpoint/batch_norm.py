"""Normalisation layers' running statistics move in forward and stand still in the recompute.

For the time of a recompute the layers get copies of their statistics, which the second forward may
move as it likes, and afterwards their own tensors back. In training the output does not depend on
them, and passing them as usual, rather than not at all, saves the same tensors as forward did.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


@contextmanager
def running_statistics_held(roots: Iterable[nn.Module]) -> Iterator[None]:
    """Whatever forward calls in this scope, the statistics under `roots` are the same after it."""
    layers = {layer for root in roots for layer in root.modules() if _has_moving_statistics(layer)}
    held = []
    try:
        for layer in layers:
            _hold(layer)
            held.append(layer)
        yield
    finally:
        for layer in held:
            _give_back(layer)


def _has_moving_statistics(layer: nn.Module) -> bool:
    # _NormBase is the base of batch norm of every kind and of instance norm.
    return isinstance(layer, _NormBase) and layer.training and layer.running_mean is not None


# Two threads may recompute the same layer at once: the first one in makes the copies, the last one
# out gives the statistics back.
_lock = threading.Lock()
_own_buffers: dict[nn.Module, dict[str, Tensor | None]] = {}
_holders: dict[nn.Module, int] = {}


def _hold(layer: nn.Module) -> None:
    with _lock:
        if layer not in _holders:
            own = dict(layer._buffers)
            layer._buffers.update({name: b if b is None else b.clone() for name, b in own.items()})
            _own_buffers[layer] = own
        _holders[layer] = _holders.get(layer, 0) + 1


def _give_back(layer: nn.Module) -> None:
    with _lock:
        _holders[layer] -= 1
        if not _holders[layer]:
            del _holders[layer]
            layer._buffers.update(_own_buffers.pop(layer))


def modules_reached(*objects: object) -> Iterator[nn.Module]:
    """The modules that calling one of `objects` can be seen to use.

    Looks into methods, partials, containers, the attributes of callable objects, what functions
    close over, their defaults, and the modules among the globals they name. A module that a
    function reaches in another way, such as through a second function, is not found.
    """
    seen: set[int] = set()
    pending: list[Any] = list(objects)
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            yield item
        elif isinstance(item, MethodType):
            pending += [item.__self__, item.__func__]
        elif isinstance(item, partial):
            pending += [item.func, *item.args, *item.keywords.values()]
        elif isinstance(item, FunctionType):
            pending += _used_by(item)
        elif isinstance(item, (list, tuple)):
            pending += item
        elif isinstance(item, dict):
            pending += item.values()
        elif callable(item) and not isinstance(item, type):
            pending += getattr(item, "__dict__", {}).values()


def _used_by(function: FunctionType) -> Iterator[object]:
    yield function.__defaults__
    yield function.__kwdefaults__
    for cell in function.__closure__ or ():
        # An empty cell belongs to a variable that is not assigned yet.
        try:
            yield cell.cell_contents
        except ValueError:
            continue
    for name in function.__code__.co_names:
        if isinstance(used := function.__globals__.get(name), nn.Module):
            yield used
