"""Iterators of Python's (`itertools.count()` on a module, `iter(rows)` that a step closes over): no
method sets them back. So what runs for a measurement gets copies, and the iterators themselves come
back afterwards, not moved.

Generators, and iterators over them, cannot be copied: they are left where the run has taken them.
"""

from __future__ import annotations

import re
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from memopt.memory.containers import attributes_of, content_of, slots_of

_OF_COPIES = ("ignore", re.compile("Pickle, copy, and deepcopy"), DeprecationWarning, None, 0)


def is_iterator_class(cls: type) -> bool:
    """Whether objects of this class are iterators of Python's that can be copied."""
    return (
        cls.__module__ in ("builtins", "itertools")
        and hasattr(cls, "__next__")
        and not issubclass(cls, (types.GeneratorType, types.CoroutineType))
    )


@contextmanager
def may_be_copied() -> Iterator[None]:
    """Python 3.12 warns of each copy of an iterator of itertools, whoever makes it."""
    # Not catch_warnings: behind it Python shows once more each warning that it shows once.
    warnings.filters.insert(0, _OF_COPIES)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        warnings.filters.remove(_OF_COPIES)  # type: ignore[attr-defined]


def reduced(iterator: Any) -> tuple[Any, ...]:
    """Return what makes an equal iterator: a function, its arguments and perhaps a state."""
    with may_be_copied():
        try:
            return tuple(iterator.__reduce__())
        except TypeError:
            return ()


def position(value: Any) -> Any:
    """Says where an iterator stands, to be compared. What it iterates over counts by its length."""
    if is_iterator_class(type(value)):
        return type(value), tuple(map(position, reduced(value)))
    if isinstance(value, tuple):
        return tuple(map(position, value))
    if isinstance(value, (int, float, complex, str, type(None))):
        return value
    return type(value), len(value) if hasattr(value, "__len__") else 0


class LentIterators:
    """The iterators that were found, and who holds them."""

    def __init__(self, iterators: Iterable[Any], holders: Iterable[object]) -> None:
        found = {id(iterator): iterator for iterator in iterators}
        self._places = [
            (entry, put)
            for holder in (holders if found else ())
            for entry, put in _places(holder)
            if id(entry) in found
        ]

    def lend(self) -> None:
        """Puts copies in the place of the iterators; one copy of each, whoever holds it."""
        copies: dict[int, Any] = {}
        for iterator, put in self._places:
            copy = _copied(iterator, copies)
            if copy is not None:
                put(copy)

    def take_back(self) -> None:
        for iterator, put in self._places:
            put(iterator)


def _copied(iterator: Any, copies: dict[int, Any]) -> Any:
    """Another iterator at the same position; None where there can be none."""
    if id(iterator) not in copies:
        parts = reduced(iterator)
        try:
            made, arguments, *state = (_with_copies(part, copies) for part in parts)
        except (ValueError, TypeError):
            return None
        copies[id(iterator)] = copy = made(*arguments)
        if state:
            # A list in a state is the iterator's own, as that in which cycle() notes its round.
            copy.__setstate__(tuple(map(_own, state[0])) if type(state[0]) is tuple else state[0])
    return copies[id(iterator)]


def _with_copies(part: Any, copies: dict[int, Any]) -> Any:
    if isinstance(part, tuple):
        return tuple(_with_copies(entry, copies) for entry in part)
    if isinstance(part, Iterator):
        copy = _copied(part, copies) if is_iterator_class(type(part)) else None
        if copy is None:
            raise TypeError(f"an iterator over {type(part).__name__} has no copy")
        return copy
    return part


def _own(entry: Any) -> Any:
    return list(entry) if type(entry) is list else entry


def _places(holder: Any) -> Iterator[tuple[object, Callable[[Any], object]]]:
    """Yield what an object holds, and what puts something else there."""
    if isinstance(holder, types.FunctionType):
        holder = holder.__globals__
    if isinstance(holder, dict):
        yield from (
            (entry, partial(dict.__setitem__, holder, key)) for key, entry in holder.items()
        )
    elif isinstance(holder, (list, deque)):
        kind: Any = list if isinstance(holder, list) else deque
        yield from ((entry, partial(kind.__setitem__, holder, n)) for n, entry in enumerate(holder))
    elif isinstance(holder, types.CellType):
        yield content_of(holder), partial(setattr, holder, "cell_contents")
    elif isinstance(holder, type):
        names = vars(holder).items()
        yield from ((entry, partial(type.__setattr__, holder, name)) for name, entry in names)
    attributes = attributes_of(holder)
    if attributes:
        yield from _places(attributes)
    yield from ((value, partial(slot.__set__, holder)) for slot, value in slots_of(holder))
