"""Tensors in objects that PyTorch cannot take apart: dataclasses, the graphs of torch_geometric."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from memopt.memory.containers import attributes_of, slots_of


def tensors_held(leaves: Iterable[object]) -> list[Tensor]:
    """The tensors that objects hold in attributes, and in what these hold; not those among
    `leaves`. No code of the objects runs.
    """
    found: list[Tensor] = []
    seen: set[int] = set()
    todo = deque[Any](leaf for leaf in leaves if not isinstance(leaf, Tensor))
    while todo:
        value = todo.popleft()
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, _ALONE) or id(value) in seen:
            continue
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            seen.add(id(value))
            todo.extend(iter(value))
        else:
            seen.add(id(value))
            todo.extend(dict.values(value) if isinstance(value, dict) else ())
            todo.extend((attributes_of(value) or {}).values())
            todo.extend(entry for _, entry in slots_of(value))
    return found


_ALONE = (
    *(nn.Module, PackedSequence, type, types.ModuleType, types.FunctionType, types.MethodType),
    *(types.BuiltinFunctionType, bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device),
)
