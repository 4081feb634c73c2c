"""A region and torch.compile: its function runs out of the compiler's sight, and where a compiled
function calls a region, some options have no effect.

A compiled frame around a region must not compile what runs inside: forward and recompute would save
different tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from memopt._errors import warn


def call_uncompiled(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`fn(*args, **kwargs)`. The engine calls this where a compiled function runs."""
    return _disabled(_apply)(fn, args, kwargs)


def _apply(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)


_disabled = functools.cache(torch.compiler.disable)


def say_without_effect(who: str, **options: Any) -> None:
    """Warns, once, of the options that are on. To be called inside torch.compile only."""
    for name, value in options.items():
        if value is not None and value is not False:
            _warn(f"{who}: {name} has no effect under torch.compile")


@functools.cache
def _warn_once(message: str) -> None:
    warn(message)


def _warn(message: str) -> None:
    _warn_once(message)


# What torch.compiler.assume_constant_result does: the warning comes when the compiler traces.
_warn._dynamo_marked_constant = True  # type: ignore[attr-defined]
