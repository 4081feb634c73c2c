"""A region's function runs out of sight of torch.compile.

A compiled frame around a region must not compile what runs inside: forward and recompute would save
different tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def call_uncompiled(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`fn(*args, **kwargs)`. The engine calls this where a compiled function runs."""
    return _disabled(_apply)(fn, args, kwargs)


def _apply(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)


_disabled = functools.cache(torch.compiler.disable)
