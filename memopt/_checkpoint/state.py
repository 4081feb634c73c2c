"""The values that a module holds at one moment, to be compared with those of another one."""

from __future__ import annotations

import random
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# How deep objects are looked into that are neither containers nor modules.
_DEPTH = 4
_NO_STATE = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class _Leaf(NamedTuple):
    """One value: what it is, which object, and how often it was written."""

    value: Any
    identity: int
    version: int


class State:
    """Parameters, buffers and other attributes of a module and of those in it, as copies: numbers,
    tensors, containers of these, and generators of random numbers. The same of objects that it is
    called with, such as a cache of keys and values.
    """

    def __init__(self, module: nn.Module, arguments: object = ()) -> None:
        self._leaves: dict[str, _Leaf] = {}
        seen: set[int] = set()
        for path, part in module.named_modules():
            for name, value in _attributes(part):
                self._leaves |= _leaves(f"{path}.{name}" if path else name, value, seen, 0)
        for value in pytree.tree_leaves(arguments):
            if not isinstance(value, (Tensor, *_PLAIN)):
                self._leaves |= _leaves(f"the argument {type(value).__name__}", value, seen, 0)

    def changes(self, later: State) -> list[str]:
        """Names of what was written, exchanged or changed since, be it by the same values."""
        return [name for name in self._names(later) if self._was_touched(name, later)]

    def differing(self, later: State) -> list[str]:
        """Names of what has other values."""
        mine, other = self._leaves, later._leaves
        return [
            name
            for name in self._names(later)
            if name not in mine
            or name not in other
            or not _is_same(mine[name].value, other[name].value)
        ]

    def _names(self, later: State) -> list[str]:
        return list(dict.fromkeys((*self._leaves, *later._leaves)))

    def _was_touched(self, name: str, later: State) -> bool:
        mine, other = self._leaves.get(name), later._leaves.get(name)
        if mine is None or other is None:
            return True
        is_other_object = isinstance(mine.value, Tensor) and mine.identity != other.identity
        return (
            is_other_object
            or mine.version != other.version
            or not _is_same(mine.value, other.value)
        )


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The module's attributes without hooks, submodules and memopt's own notes."""
    yield from module._parameters.items()
    yield from module._buffers.items()
    for name, value in module.__dict__.items():
        if name not in _OF_MODULES and not name.startswith("_memopt"):
            yield name, value


_OF_MODULES = frozenset(nn.Module().__dict__) - {"training"}


def _leaves(name: str, value: Any, seen: set[int], depth: int) -> dict[str, _Leaf]:
    if isinstance(value, _PLAIN):
        return {name: _Leaf(value, 0, 0)}
    if id(value) in seen or isinstance(value, _NO_STATE):
        return {}
    if isinstance(value, Tensor):
        # No tensor is looked at twice, but each under every name.
        version = 0 if value.is_inference() else value._version
        return {name: _Leaf(value.detach().clone(), id(value), version)}
    if isinstance(value, torch.Generator):
        return {name: _Leaf(value.get_state(), 0, 0)}
    if isinstance(value, random.Random):
        return {name: _Leaf(value.getstate(), 0, 0)}
    seen.add(id(value))
    found: dict[str, _Leaf] = {}
    if isinstance(value, Mapping):
        entries = [(f"{name}[{key!r}]", entry) for key, entry in value.items()]
    elif isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        entries = [(f"{name}[{place}]", entry) for place, entry in enumerate(value)]
    elif isinstance(value, (set, frozenset)):
        return {name: _Leaf(frozenset(map(_of_set, value)), 0, 0)}
    elif depth < _DEPTH and hasattr(value, "__dict__"):
        entries = [(f"{name}.{key}", entry) for key, entry in vars(value).items()]
    else:
        return {}
    found[f"len({name})"] = _Leaf(len(entries), 0, 0)
    for key, entry in entries:
        found |= _leaves(key, entry, seen, depth + 1)
    return found


def _of_set(entry: Any) -> Any:
    return entry if isinstance(entry, _PLAIN) else id(entry)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values have equal bits, also where they are NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
            return False
        if one.layout is not torch.strided:
            return True
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    return bool(one == other or (one != one and other != other))
