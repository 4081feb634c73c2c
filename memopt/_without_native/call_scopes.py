"""Scopes around the calls of a module, as csrc/python/call_scopes.h has them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import AbstractContextManager
from typing import Any

from torch import nn


class CallHooks(OrderedDict[Any, Any]):
    """Never made: a module's dictionaries of hooks stay what they are."""


def become_call_hooks(dictionary: dict[Any, Any], become: bool, /) -> None:
    """Nothing: PyTorch takes its path for calls with hooks."""


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.entered: list[tuple[nn.Module, str, AbstractContextManager[Any]]] = []


_here = _OfThread()


def enter_context(module: nn.Module, key: str, context: AbstractContextManager[Any], /) -> None:
    """Enter `context` until `leave_call`, for the hook `key` of `module`."""
    context.__enter__()
    _here.entered.append((module, key, context))


def leave_call(module: nn.Module, key: str, /) -> None:
    """End what this call of `module` has entered, if anything."""
    if _here.entered and _here.entered[-1][:2] == (module, key):
        _here.entered.pop()[2].__exit__(None, None, None)


def end_interrupted_calls() -> None:
    """Nothing: there are no recipes, which an interrupted call would leave on."""
