"""Arguments of a wrong type: the error names the function that was called, the argument and the
type that it must have, in place of the operator behind it.

Types are looked at after an error only, so that a call that is right pays for nothing but a frame.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from memopt._compat import tracing_state

P = ParamSpec("P")
R = TypeVar("R")


def names_arguments(fn: Callable[P, R]) -> Callable[P, R]:
    """`fn`, a function or a class's __init__, whose annotations say what its arguments must be."""

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            wrong = wrong_argument(fn, args, kwargs)
            if wrong is None:
                raise
            name = type(args[0]).__name__ if fn.__name__ == "__init__" else fn.__name__
            raise TypeError(f"{name}: {wrong}") from error

    return call


def as_ints(shape: Sequence[int]) -> Sequence[int]:
    """`shape` for an operator: torch.jit.trace has tensors in the place of sizes, which the lists
    of an operator outside PyTorch cannot hold.
    """
    return shape if tracing_state() is None else [int(size) for size in shape]


def wrong_argument(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """The error text for the first argument that does not fit the annotations of `fn`, or None."""
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except TypeError:
        return None  # Python's own error names the function
    try:
        hints = typing.get_type_hints(fn)
    except NameError:  # imported for the type checker alone
        return None
    for name, value in bound.arguments.items():
        if name in hints and not _is(value, hints[name]):
            return f"{name} must be {_described(hints[name])}, got {_got(value, hints[name])}"
    return None


def _is(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_is(value, each) for each in typing.get_args(hint))
    if origin is not None and issubclass(origin, Sequence):
        if isinstance(value, (Tensor, str)):
            return False
        try:
            elements = list(value)
        except TypeError:
            return False
        (element,) = typing.get_args(hint)[:1] or (Any,)
        return all(_is(each, element) for each in elements)
    if hint is float:
        return _is_number(value, (int, float, torch.SymInt, torch.SymFloat))
    if hint is int:
        return _is_number(value, (int, torch.SymInt)) or hasattr(value, "__index__")
    if hint is bool:
        return True  # whatever it is, it is true or not
    if hint is Tensor and hasattr(value, "__torch_function__"):
        return True  # what stands for a tensor, such as torch.fx's Proxy
    return not isinstance(hint, type) or isinstance(value, hint)


def _is_number(value: Any, kinds: tuple[type, ...]) -> bool:
    # A tensor of one number, or NumPy's, is taken for it.
    return isinstance(value, kinds) or (hasattr(value, "item") and getattr(value, "ndim", 1) == 0)


def _described(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_described(each) for each in typing.get_args(hint))
    if origin is not None and issubclass(origin, Sequence):
        (element,) = typing.get_args(hint)[:1] or (Any,)
        return f"a sequence of {_described(element).split(' ', 1)[-1]}s"
    if hint is type(None):
        return "None"
    name = getattr(hint, "__name__", str(hint))
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _got(value: Any, hint: Any) -> str:
    kind = "None" if value is None else type(value).__name__
    if isinstance(value, (list, tuple)) and "Sequence" in str(hint):
        return f"{kind} of {', '.join(dict.fromkeys(type(each).__name__ for each in value))}"
    return kind
