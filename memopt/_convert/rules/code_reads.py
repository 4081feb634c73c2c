"""Reads the code of a module's forward for what a probe does not vary by itself."""

from __future__ import annotations

import types
from collections.abc import Iterator

from torch import nn

from memopt._class_patch import original_class
from memopt._function_code import plain_function

_MOST = 1_000_000
"""The largest number that a probe tries as a size."""


def sizes_in(module: nn.Module) -> tuple[int, ...]:
    """The numbers in its code that may be sizes at which it does something else."""
    numbers = {value for code in _codes(module) for value in code.co_consts if type(value) is int}
    return tuple(sorted(number for number in numbers if 6 < number <= _MOST))


def reads_flags(module: nn.Module) -> bool:
    """Whether its code reads True or False from globals or from its class: such switches may be
    turned later, for which no call looks.
    """
    classes = [cls for cls in original_class(type(module)).__mro__ if not _is_pytorchs(cls)]
    for code, around in _functions(module):
        for name in code.co_names:
            values = [around.get(name), *(vars(cls).get(name) for cls in classes)]
            if name not in module.__dict__ and any(type(value) is bool for value in values):
                return True
    return False


def _is_pytorchs(cls: type) -> bool:
    return cls is object or cls.__module__.split(".")[0] == "torch"


def _codes(module: nn.Module) -> Iterator[types.CodeType]:
    for code, _ in _functions(module):
        yield code


def _functions(module: nn.Module) -> Iterator[tuple[types.CodeType, dict[str, object]]]:
    """The code of forward, of the methods that it names, and of functions inside of these, each
    with its globals.
    """
    cls = original_class(type(module))
    todo: list[tuple[object, dict[str, object]]] = [(plain_function(cls.forward), {})]
    seen: set[types.CodeType] = set()
    while todo:
        found, around = todo.pop()
        if isinstance(found, types.FunctionType):
            around = found.__globals__
        code = getattr(found, "__code__", found)
        if not isinstance(code, types.CodeType) or code in seen:
            continue
        seen.add(code)
        yield code, around
        todo += [(value, around) for value in code.co_consts]
        for name in code.co_names:
            method = next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), None)
            method = getattr(method, "__func__", method)
            if not (getattr(method, "__module__", None) or "torch").startswith("torch"):
                todo.append((plain_function(method), around))
