"""The calls that a probe has found to work on each row alone, so that they are not probed again.

Two calls are the same if they have the same modules, of the same plain attributes (training or not,
a dim) and functions among them; the same code, with the same values in closures, defaults, partials
and globals; and arguments of one structure: the same plain values, tensors of as many dims and one
dtype, the same ones with rows. Functions and containers are what they hold, so that a lambda that
is made anew in each step is known; other objects are told apart by identity, and not looked into.
Nothing here keeps an object alive.
"""

from __future__ import annotations

import functools
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt._checkpoint.chunks import CallRows
from memopt._checkpoint.naming import region_name, unwrapped
from memopt._extension import _C
from memopt.memory.containers import content_of

PLAIN = (bool, int, float, str, type(None))
_PLAIN_TYPES = frozenset({*PLAIN, complex, bytes, torch.dtype, torch.device, torch.Size})
_FUNCTIONS = frozenset(
    {types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial}
)
_CONTAINERS = frozenset({list, tuple, dict})
_LOOKED_INTO_OF_MODULES = _PLAIN_TYPES | _FUNCTIONS | _CONTAINERS
_OF_ALL_MODULES = frozenset(vars(nn.Module())) - {"training"}
_DEEP = 20
_LONG = 64
"""Values that lie deeper, or in longer containers, are not looked at."""
_MOST = 4096
"""The calls that are known. Beyond that the oldest is forgotten: an attribute may count steps."""
_OFTEN = 32
"""The number of probes of one function that a warning tells."""


@dataclass
class _Known:
    refs: list[weakref.ref[Any]]
    in_chunks: bool
    least: list[int]
    most: list[int]
    """The sizes that were looked at, of each dim of rows."""

    refused: str = ""
    """Why it may not, if it is not to be asked again."""


_known: dict[Any, _Known] = {}
_probes: dict[Any, int] = {}
_lock = threading.Lock()


class KnownCall:
    """A call, and what is known of it."""

    def __init__(self, fn: Callable[..., Any], rows: CallRows, owner: nn.Module | None) -> None:
        reached = _C.modules_reached(fn if owner is None else owner)
        self.modules = reached if owner is None else [owner]
        self._subject = fn if owner is None else owner
        keys = _Keys()
        self._key = (
            keys.of(fn),
            tuple([keys.of_module(module) for module in reached]),
            len(rows.row_sizes),
            _of_structure(rows.spec),
            tuple(
                [
                    _of_tensor(leaf, rows.are_of(leaf))
                    if isinstance(leaf, Tensor)
                    else (type(leaf), keys.of(leaf))
                    for leaf in rows.leaves
                ]
            ),
        )
        self._refs = keys.refs

    @property
    def in_chunks(self) -> bool | None:
        """Whether it may run in chunks; None where it was not probed."""
        known = self._found()
        return None if known is None else known.in_chunks

    @property
    def refused(self) -> str:
        """Why it may not run in chunks; empty where it may, or was not probed."""
        known = self._found()
        return "" if known is None else known.refused

    def covers(self, sizes: Iterable[tuple[int, ...]]) -> bool:
        """Whether as few rows and as many were looked at before."""
        known = self._found()
        return known is not None and all(
            least <= size <= most
            for each in sizes
            for least, size, most in zip(known.least, each, known.most, strict=True)
        )

    def note(self, in_chunks: bool, sizes: Sequence[tuple[int, ...]], refused: str = "") -> None:
        """Keep what was found, for rows of these sizes."""
        if (known := self._found()) is not None:
            sizes = (*sizes, tuple(known.least), tuple(known.most))
            with _lock:
                known.least, known.most = _spans(sizes)
            return
        who = getattr(unwrapped(self._subject), "__code__", type(self._subject))
        key = who, *map(id, self.modules)
        with _lock:
            _put(_known, self._key, _Known(self._refs, in_chunks, *_spans(sizes), refused))
            _put(_probes, key, times := _probes.get(key, 0) + 1)
        if times == _OFTEN:
            warnings.warn(
                f"chunks: {region_name(self._subject)} was probed {times} times, since something "
                "that it uses is another one in each call (a number among its arguments, "
                "attributes or closures, a new object); that is slow: hand over a tensor instead",
                stacklevel=2,
            )

    def _found(self) -> _Known | None:
        known = _known.get(self._key)
        # Another object may have got the address of one that is dead.
        return None if known is None or any(ref() is None for ref in known.refs) else known


def _spans(sizes: Iterable[tuple[int, ...]]) -> tuple[list[int], list[int]]:
    dims = list(zip(*sizes, strict=True))
    return [min(dim) for dim in dims], [max(dim) for dim in dims]


def _put(entries: dict[Any, Any], key: Any, value: Any) -> None:
    entries.pop(key, None)
    entries[key] = value
    while len(entries) > _MOST:
        del entries[next(iter(entries))]


class _Keys:
    """Keys of values, and references to the objects whose addresses are in them."""

    def __init__(self) -> None:
        self.refs: list[weakref.ref[Any]] = []

    def of(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind in _PLAIN_TYPES:
            return value
        if isinstance(value, Tensor):
            return _of_tensor(value, value.is_inference())
        if depth > _DEEP:
            return kind
        if kind is types.FunctionType:
            return self._of_function(value, depth + 1)
        if kind is types.MethodType:
            return self.of(value.__func__, depth + 1), self.of(value.__self__, depth + 1)
        if kind is functools.partial:
            parts = (value.func, value.args, value.keywords)
            return tuple([self.of(part, depth + 1) for part in parts])
        if kind in _CONTAINERS:
            if len(value) > _LONG:
                return kind, len(value)
            entries = value.items() if kind is dict else value
            return (kind, *[self.of(entry, depth + 1) for entry in entries])
        return self._one(value)

    def of_module(self, module: nn.Module) -> Any:
        attributes = [
            (name, value if type(value) in _PLAIN_TYPES else self.of(value))
            for name, value in vars(module).items()
            if name not in _OF_ALL_MODULES
            and type(value) in _LOOKED_INTO_OF_MODULES
            and not name.startswith("_memopt")
        ]
        return type(module), self._one(module), tuple(attributes)

    def _of_function(self, function: types.FunctionType, depth: int) -> Any:
        code, names = function.__code__, function.__globals__
        used = [names.get(name) for name in code.co_names]
        return (
            code,
            self.of(function.__defaults__, depth),
            self.of(function.__kwdefaults__, depth),
            *[
                None if (held := content_of(cell)) is function else self.of(held, depth)
                for cell in function.__closure__ or ()
            ],
            *[value for value in used if type(value) in _PLAIN_TYPES],
            *[value.__code__ for value in used if type(value) is types.FunctionType],
        )

    def _one(self, value: Any) -> Any:
        """The key of this very object, or of its value where nothing can refer to it weakly."""
        if isinstance(value, (int, float, str)):  # of an enum, say
            return value
        try:
            self.refs.append(weakref.ref(value))
        except TypeError:
            return type(value)
        return id(value)


def _of_tensor(tensor: Tensor, mark: bool) -> Any:
    return mark, tensor.dim(), tensor.dtype


def _of_structure(spec: Any) -> Any:
    """How arguments are nested, as text where they are in what has no hash."""
    try:
        hash(spec)
    except TypeError:
        return repr(spec)
    return spec
