"""Reads the code of a module's forward for what a probe does not vary by itself."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator

from torch import Tensor, nn

from memopt._class_patch import original_class
from memopt._function_code import plain_function

_MOST = 4096
"""The largest number that a probe tries as a size: 64 MB at a width of 4,096."""


def sizes_in(module: nn.Module) -> tuple[int, ...]:
    """The numbers in its code that may be sizes at which it does something else."""
    numbers = {value for code in _codes(module) for value in code.co_consts if type(value) is int}
    return tuple(sorted(number for number in numbers if 6 < number <= _MOST))


def reads_flags(module: nn.Module) -> bool:
    """Whether its code reads True or False from globals or from its class: such switches may be
    turned later, for which no call looks.
    """
    classes = [cls for cls in original_class(type(module)).__mro__ if not _is_pytorchs(cls)]
    own = {*vars(module), *module._parameters, *module._buffers, *module._modules}
    for code, around in _functions(module):
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                values = [around.get(step.argval)]
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval not in own:
                values = [vars(cls).get(step.argval) for cls in classes]
            else:
                continue
            if any(type(value) is bool for value in values):
                return True
    return False


def writes_in_place(module: nn.Module) -> bool:
    """Whether its code has an operation that writes a tensor in place, as it seems: `h += x` of
    anything but a tuple, a list or a number as it stands, or a method like `h.add_(x)`.
    """
    for code in _codes(module):
        before = ""
        for step in dis.get_instructions(code):
            is_sum = step.opname.startswith("INPLACE_") or (
                step.opname == "BINARY_OP" and step.argrepr.endswith("=")
            )
            if (is_sum and not before.startswith(_NO_TENSOR)) or _is_write(step.argval):
                return True
            if step.opname != "CACHE":
                before = step.opname
    return False


# Instructions that make a tuple, a list or a number.
_NO_TENSOR = ("BUILD_", "LIST_", "LOAD_CONST", "LOAD_SMALL_INT")


def _is_write(name: object) -> bool:
    """Whether it is the name of a method of tensors that writes their elements."""
    if not isinstance(name, str) or name.startswith("_") or not name.endswith("_"):
        return False
    return hasattr(Tensor, name) and name not in ("requires_grad_", "detach_", "share_memory_")


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
