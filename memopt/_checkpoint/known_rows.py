"""The calls that a probe has found to work on each row alone, so that they are not probed again.

A call is known by what its arguments look like, values of plain ones included, by its function with
what that closes over, and by the modules that it uses: their training flags and plain attributes.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from memopt._checkpoint.chunks import CallRows
from memopt._extension import _C

PLAIN = (bool, int, float, str, type(None))
_PLAIN_TYPES = frozenset(PLAIN)
_MOST = 256
"""Calls that are known of one module, and of functions without modules. Beyond that the oldest is
forgotten: an attribute may count steps."""

_of_modules: weakref.WeakKeyDictionary[nn.Module, OrderedDict[Any, Any]] = (
    weakref.WeakKeyDictionary()
)
_of_functions: OrderedDict[Any, Any] = OrderedDict()


class KnownCall:
    """A call, and whether it was probed before."""

    def __init__(self, fn: Callable[..., Any], rows: CallRows, owner: nn.Module | None) -> None:
        self.modules = [owner] if owner is not None else _C.modules_reached(fn)
        self._held: list[object] = []
        """Objects whose identity is in the key: as long as they are held, no other has it."""
        arguments = tuple(self._look(leaf, rows) for leaf in rows.leaves)
        self._call = (len(rows.row_sizes), rows.structure, arguments, self._of(fn))

    @property
    def is_known(self) -> bool:
        return all(key in known for known, key in self._places())

    def note(self) -> None:
        for known, key in self._places():
            known[key] = self._held
            if len(known) > _MOST:
                known.popitem(last=False)

    def _places(self) -> Iterator[tuple[OrderedDict[Any, Any], Any]]:
        if not self.modules:
            yield _of_functions, self._call
        for module in self.modules:
            known = _of_modules.setdefault(module, OrderedDict())
            yield known, (self._call, tuple(map(_state, module.modules())))

    def _look(self, leaf: Any, rows: CallRows) -> Any:
        if isinstance(leaf, Tensor):
            return rows.are_of(leaf), leaf.dim(), leaf.dtype
        return self._of(leaf)

    def _of(self, value: Any) -> Any:
        """A key for a function or an argument: plain values by value, functions by their code and
        what they close over, other objects by identity. Modules have keys of their own.
        """
        kind = type(value)
        if kind in _PLAIN_TYPES:
            return kind, value
        if isinstance(value, (Tensor, nn.Module)):
            return kind
        if isinstance(value, functools.partial):
            given = (*value.args, *value.keywords.values())
            return kind, self._of(value.func), (*value.keywords,), tuple(map(self._of, given))
        if isinstance(value, types.MethodType):
            return kind, self._of(value.__func__), self._of(value.__self__)
        if isinstance(value, types.FunctionType):
            around = getattr(value, "__wrapped__", None)
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
            defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            reached = [each for each in (*cells, *defaults, around) if each is not value]
            return value.__code__, tuple(map(self._shallow, reached))
        self._held.append(value)
        return kind, id(value)

    def _shallow(self, value: Any) -> Any:
        """The key of what a function reaches, of which functions may reach each other."""
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
            plain = [each for each in cells if type(each) in _PLAIN_TYPES]
            self._held.append(value.__code__)
            return value.__code__, tuple((type(each), each) for each in plain)
        return self._of(value)


def _is_full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # of a variable that is not set yet
        return False
    return True


def _state(module: nn.Module) -> tuple[Any, ...]:
    """The plain attributes of a module, its training flag among them."""
    return tuple(
        (name, value) for name, value in vars(module).items() if type(value) in _PLAIN_TYPES
    )
