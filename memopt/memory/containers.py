"""Python's containers and objects: their contents are noted, and put back later.

A container stays the object that it is: others refer to it.
"""

from __future__ import annotations

import array
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch

from memopt._function_code import others_attributes

Restore = Callable[[], None]
"""Makes one object what it was."""

_NOTHING = object()


def kept_dict(value: dict[Any, Any]) -> Restore:
    """Restores the order too; an OrderedDict has one beside that of the dict that it is. A subclass
    with methods of its own is written to as a plain one.
    """
    kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    before = list(kind.items(value))

    def restore() -> None:
        if not _same_pairs(kind.items(value), before):
            kind.clear(value)
            for key, entry in before:
                kind.__setitem__(value, key, entry)

    return restore


def kept_attributes(function: types.FunctionType) -> Restore:
    """Restores a function's attributes, but for those that go with its code (_function_code.py)."""
    before = others_attributes(function)

    def restore() -> None:
        now = others_attributes(function)
        if not _same_pairs(now.items(), list(before.items())):
            for name in now:
                del function.__dict__[name]
            function.__dict__.update(before)

    return restore


def kept_list(value: list[Any]) -> Restore:
    before = list.copy(value)

    def restore() -> None:
        if not _same(value, before):
            list.__setitem__(value, slice(None), before)

    return restore


def kept_deque(value: deque[Any]) -> Restore:
    before = list(value)

    def restore() -> None:
        if not _same(value, before):
            deque.clear(value)
            deque.extend(value, before)

    return restore


def kept_set(value: set[Any]) -> Restore:
    before = {id(entry): entry for entry in value}

    def restore() -> None:
        if {id(entry) for entry in value} != before.keys():
            set.clear(value)
            set.update(value, before.values())

    return restore


def kept_weak(value: Any) -> Restore:
    """Restores a weak dict or set, as far as its entries are alive."""
    is_set = isinstance(value, weakref.WeakSet)
    before = list(value) if is_set else list(value.items())

    def restore() -> None:
        now = list(value) if is_set else list(value.items())
        if _same(now, before) if is_set else _same_pairs(now, before):
            return
        value.clear()
        value.update(before)

    return restore


def kept_bytes(value: bytearray | array.array[Any]) -> Restore:
    before = value[:]

    def restore() -> None:
        if value != before:
            value[:] = before  # type: ignore[assignment]

    return restore


def kept_stream(value: Any) -> Restore:
    """Restores the text or the bytes of a StringIO or BytesIO, and the place in it."""
    before = value.__getstate__()

    def restore() -> None:
        if not value.closed and value.__getstate__() != before:
            value.__setstate__(before)

    return restore


def kept_array(value: Any) -> Restore:
    """Restores a numpy array. Its memory may be shared, so it is written in place."""
    before = value.copy()
    shape, strides = value.shape, value.strides

    def restore() -> None:
        if not value.flags.writeable:
            value.flags.writeable = True
        if value.dtype != before.dtype:
            value.dtype = before.dtype
        if value.size != before.size:
            value.resize(shape, refcheck=False)
        if value.shape != shape or value.strides != strides:
            value.shape = shape
        if value.dtype.hasobject or value.tobytes() != before.tobytes():
            value[...] = before

    return restore


def kept_cell(cell: types.CellType) -> Restore:
    """A variable that a function closes over."""
    before = content_of(cell)

    def restore() -> None:
        if content_of(cell) is before:
            return
        if before is _NOTHING:
            del cell.cell_contents
        else:
            cell.cell_contents = before

    return restore


def content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _NOTHING


def kept_object(value: Any) -> Restore:
    """Restores an object's class, attributes and slots, without the setters of its class."""
    cls = type(value)
    attributes = attributes_of(value)
    before = None if attributes is None else list(attributes.items())
    slots = [(slot, _slot_of(slot, value)) for slot in _slots(cls)]

    def restore() -> None:
        if type(value) is not cls:
            object.__setattr__(value, "__class__", cls)
        now = attributes_of(value)
        if before is not None and now is not None and not _same_pairs(now.items(), before):
            now.clear()
            now.update(before)
        for slot, entry in slots:
            if _slot_of(slot, value) is entry:
                continue
            if entry is _NOTHING:
                slot.__delete__(value)
            else:
                slot.__set__(value, entry)

    return restore


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The object's `__dict__`, whatever its class makes of attributes; None without one."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def slots_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the descriptors of an object's slots that are set, with what is in them."""
    for slot in _slots(type(value)):
        entry = _slot_of(slot, value)
        if entry is not _NOTHING:
            yield slot, entry


def kept_script(module: torch.jit.ScriptModule) -> Restore:
    """Restores the attributes that TorchScript holds: numbers, and containers by what is in them.
    Of a module that was loaded from a file nothing tells which there are.
    """
    script: Any = module
    concrete = script.__dict__.get("_concrete_type")
    names = () if concrete is None else concrete.get_attributes()
    before = [(name, script._c.getattr(name)) for name in names]  # of containers it makes copies

    def restore() -> None:
        for name, value in before:
            script._c.setattr(name, value)

    return restore


def kept_class(cls: type) -> Restore:
    """Methods and attributes of a class: what a first call patches, and what instances count."""
    before = dict(vars(cls))

    def restore() -> None:
        now = vars(cls)
        if len(now) == len(before) and all(now.get(n, _NOTHING) is v for n, v in before.items()):
            return
        for name in [name for name in now if name not in before]:
            type.__delattr__(cls, name)
        for name, entry in before.items():
            if now.get(name, _NOTHING) is not entry:
                type.__setattr__(cls, name, entry)

    return restore


def kept_names(namespace: dict[str, Any], names: Iterable[str]) -> Restore:
    """Some names of many: of globals, those that a function assigns."""
    before = [(name, namespace.get(name, _NOTHING)) for name in names]

    def restore() -> None:
        for name, entry in before:
            if entry is _NOTHING:
                namespace.pop(name, None)
            elif namespace.get(name, _NOTHING) is not entry:
                namespace[name] = entry

    return restore


def kept_cache(function: Any) -> Restore:
    """Restores a function under functools.cache. Its cache cannot be filled again. So it is emptied
    if something came in, which may be a tensor without values.
    """
    before = function.cache_info()

    def restore() -> None:
        if function.cache_info().misses != before.misses:
            function.cache_clear()

    return restore


def is_array(value: object) -> bool:
    """Whether it is a numpy array that may be written, of what is in memory."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return False
    array_: Any = value
    return bool(array_.flags.writeable) and not isinstance(value, numpy.memmap)


def _same(one: Iterable[Any], before: list[Any]) -> bool:
    now = list(one)
    return len(now) == len(before) and all(map(is_, now, before))


def _same_pairs(one: Iterable[tuple[Any, Any]], before: list[tuple[Any, Any]]) -> bool:
    now = list(one)
    return len(now) == len(before) and all(
        map(is_, chain.from_iterable(now), chain.from_iterable(before))
    )


def _slots(cls: type) -> list[Any]:
    found = _known_slots.get(cls)
    if found is None:
        found = _known_slots[cls] = [
            entry
            for base in cls.__mro__
            if "__slots__" in vars(base)
            for entry in vars(base).values()
            if isinstance(entry, types.MemberDescriptorType)
        ]
    return found


_known_slots: weakref.WeakKeyDictionary[type, list[Any]] = weakref.WeakKeyDictionary()


def _slot_of(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value, type(value))
    except AttributeError:
        return _NOTHING


GLOBAL_HOOKS = tuple(
    value
    for name, value in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and isinstance(value, dict)
)
"""Hooks on all modules."""
