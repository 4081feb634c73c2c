"""Tensors in objects that PyTorch cannot take apart: dataclasses, the graphs of torch_geometric."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from memopt.memory.containers import (
    Restore,
    attributes_of,
    kept_deque,
    kept_dict,
    kept_list,
    kept_object,
    kept_set,
    slots_of,
)


def tensors_held(leaves: Iterable[object]) -> list[Tensor]:
    """The tensors that objects hold in attributes, and in what these hold; not those among
    `leaves`. No code of the objects runs.
    """
    return [value for value in _held(leaves) if isinstance(value, Tensor)]


def kept_holders(batch: object) -> list[Restore]:
    """Functions that put back what a batch's containers and objects hold now."""
    return [
        restore
        for value in _held([batch])
        if not isinstance(value, Tensor)
        for restore in _kept(value)
    ]


def _kept(value: Any) -> Iterator[Restore]:
    for kind, kept in _CONTAINERS.items():
        if isinstance(value, kind):
            yield kept(value)
    if type(value) not in _CONTAINERS:
        yield kept_object(value)


def _held(roots: Iterable[object]) -> Iterator[Any]:
    """Yield what is in these, deep inside, and those of them that are no tensors."""
    seen: set[int] = set()
    todo = deque[Any](root for root in roots if not isinstance(root, Tensor))
    while todo:
        value = todo.popleft()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, _ALONE) or id(value) in seen:
            continue
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            seen.add(id(value))
            todo.extend(iter(value))
            yield value
        else:
            seen.add(id(value))
            todo.extend(dict.values(value) if isinstance(value, dict) else ())
            todo.extend((attributes_of(value) or {}).values())
            todo.extend(entry for _, entry in slots_of(value))
            yield value


_CONTAINERS: dict[type, Callable[[Any], Restore]] = {
    dict: kept_dict,
    list: kept_list,
    set: kept_set,
    deque: kept_deque,
}
_ALONE = (
    *(nn.Module, PackedSequence, type, types.ModuleType, types.FunctionType, types.MethodType),
    *(types.BuiltinFunctionType, bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device),
)
