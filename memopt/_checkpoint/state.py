"""The values that a module holds at one moment, to be compared with those of another one."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from memopt.memory.generators import generator_state, state_for_all
from memopt.memory.iterators import is_iterator_class, position

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
    tensors, containers of these, iterators, and generators of random numbers, those that Python
    and NumPy have for all among them. The same of objects that it is called with, such as a cache
    of keys and values.
    """

    def __init__(self, module: nn.Module, arguments: object = ()) -> None:
        self._leaves = {name: _Leaf(value, 0, 0) for name, value in state_for_all().items()}
        seen: set[int] = set()
        for path, part in module.named_modules():
            for name, value in _attributes(part):
                self._leaves |= _leaves(f"{path}.{name}" if path else name, value, seen, 0)
        self._leaves |= _of_arguments(arguments, seen)

    def changes(self, later: State) -> list[str]:
        """Names of what was written, exchanged or changed since, be it by the same values."""
        return _touched(self._leaves, later._leaves)

    def differing(self, later: State) -> list[str]:
        """Names of what has other values."""
        mine, other = self._leaves, later._leaves
        return [
            name
            for name in _names(mine, other)
            if name not in mine
            or name not in other
            or not _is_same(mine[name].value, other[name].value)
        ]


def _names(one: dict[str, _Leaf], other: dict[str, _Leaf]) -> list[str]:
    return list(dict.fromkeys((*one, *other)))


def _touched(mine: dict[str, _Leaf], later: dict[str, _Leaf]) -> list[str]:
    return [
        name
        for name in _names(mine, later)
        if name not in mine or name not in later or _was_touched(mine[name], later[name])
    ]


def _was_touched(one: _Leaf, other: _Leaf) -> bool:
    is_other_object = isinstance(one.value, Tensor) and one.identity != other.identity
    return is_other_object or one.version != other.version or not _is_same(one.value, other.value)


class ArgumentState:
    """A call's arguments at one moment: their containers, tensors, and objects of the user's."""

    def __init__(self, arguments: object) -> None:
        self._leaves, self._spec = pytree.tree_flatten(arguments)
        self._versions = [version_of(leaf) for leaf in self._leaves if isinstance(leaf, Tensor)]
        self._objects = _of_arguments(arguments, set())

    def written(self, later: ArgumentState) -> str:
        """Names what the call has written into the same arguments; empty if nothing."""
        if self._spec != later._spec or not all(map(is_, self._leaves, later._leaves)):
            return "a container"
        if self._versions != later._versions:
            return "a tensor, in place"
        return next(iter(_touched(self._objects, later._objects)), "")


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The module's attributes without hooks, submodules and memopt's own notes."""
    yield from module._parameters.items()
    yield from module._buffers.items()
    for name, value in module.__dict__.items():
        if name not in _OF_MODULES and not name.startswith("_memopt"):
            yield name, value


_OF_MODULES = frozenset(nn.Module().__dict__) - {"training"}


def _of_arguments(arguments: object, seen: set[int]) -> dict[str, _Leaf]:
    """The objects among a call's arguments, without its tensors."""
    found: dict[str, _Leaf] = {}
    for value in pytree.tree_leaves(arguments):
        if not isinstance(value, (Tensor, *_PLAIN)):
            found |= _leaves(f"the argument {type(value).__name__}", value, seen, 0)
    return found


def _leaves(name: str, value: Any, seen: set[int], depth: int) -> dict[str, _Leaf]:
    if isinstance(value, _PLAIN):
        return {name: _Leaf(value, 0, 0)}
    if id(value) in seen or isinstance(value, _NO_STATE):
        return {}
    if isinstance(value, Tensor):
        # No tensor is looked at twice, but each under every name.
        return {name: _Leaf(value.detach().clone(), id(value), version_of(value))}
    state = generator_state(value)
    if state is not None:
        return {name: _Leaf(state, 0, 0)}
    if is_iterator_class(type(value)):
        return {name: _Leaf(position(value), 0, 0)}
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


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written; 0 where that is not counted."""
    return 0 if tensor.is_inference() else tensor._version


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
